"""The arguments of `headrace submit`, with the sweep, nodes and processes of its training configs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import ConfigError
from foundation.paths import is_url
from headrace.submission.configs import Element, Given, before, elements
from headrace.submission.site import SiteConfig
from headrace.submission.stages import settings_for


@dataclass(frozen=True)
class Request:
    """The arguments of `headrace submit`.

    Attributes:
        nodes: number of nodes of each training config, or one number for all configs.
        tasks: processes on each node; None for one per GPU of the site, or one without GPUs.
        workers: number of jobs in each array of data prep; None for the default.
        sweeps: texts of `--sweep`, KEY=VALUE,VALUE.
        doctor: whether `headrace doctor` checks the nodes before each training.
    """

    files: Sequence[str]
    overrides: Sequence[str] = ()
    nodes: Sequence[int] = (1,)
    tasks: int | None = None
    workers: int | None = None
    sweeps: Sequence[str] = ()
    site: Path | None = None
    doctor: bool = False
    dry_run: bool = False


def sweep_of(configs: Sequence[Given], sweeps: Sequence[str]) -> list[Element]:
    """The elements of a sweep; none without `--sweep`.

    Raises:
        ConfigError: there are several training configs or none, another stage reads the run, or run.dir is a URL.
    """
    if not sweeps:
        return []
    runs = [each for each in configs if each.kind == "run"]
    if len(runs) != 1:
        why = f"a sweep takes one training config, and {len(runs)} are given"
        raise ConfigError("--sweep", sweeps[0], why=why, remedy="submit the others by themselves")
    late = [each.file for each in configs if runs[0] in before(each, [runs[0]]) and each is not runs[0]]
    if late:
        why = f"{late[0]} reads the run, and a sweep has several"
        raise ConfigError("--sweep", sweeps[0], why=why, remedy=f"submit {late[0]} when the best run is known")
    named = runs[0].raw["run"]["dir"]
    if is_url(named):
        why = "the elements of a sweep have directories below run.dir, which is a URL"
        raise ConfigError("--sweep", sweeps[0], why=why, remedy="--set run.dir=DIR, a path")
    return elements(runs[0].makes, sweeps)


def nodes_of(configs: Sequence[Given], nodes: Sequence[int]) -> list[int]:
    """Number of nodes of each training config.

    Raises:
        ConfigError: there are several numbers, but not as many as training configs.
    """
    runs = sum(each.kind == "run" for each in configs)
    if len(nodes) not in (1, runs):
        why = f"there are {len(nodes)} numbers and {runs} training configs"
        raise ConfigError("--nodes", ",".join(map(str, nodes)), why=why, remedy="give one number, or one for each")
    return [*nodes] if len(nodes) == runs else [*nodes] * runs


def tasks_of(asked: int | None, site: SiteConfig) -> int:
    """Processes of a training on each node.

    Raises:
        ConfigError: the site's nodes have another number of GPUs.
    """
    gpus = settings_for("run", site).gpus
    if asked is not None and gpus is not None and asked != gpus:
        why = f"the site's nodes have {gpus} GPUs, and there is one process for each"
        raise ConfigError("--tasks-per-node", asked, why=why, remedy=f"leave it out, or train.gpus = {asked}")
    return asked or gpus or 1
