"""A check of `headrace doctor`, what it is given, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Place = Literal["node", "ranks", "launcher"]
"""Where a check runs: once on each node; on every rank, with a process group; or once, starting trainings itself."""


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        passed: whether it passed; None if it could not be checked here, for the reason in `text`.
        text: one sentence with what was seen; no traceback.
        meaning: consequences of a failure for a training; empty if it passed.
        remedy: advice on a failure; empty if it passed.
        figures: measured values by name, with the unit in the name, such as `all_reduce_gb_per_s`.
        where: the node or ranks that it concerns; empty for all.
    """

    passed: bool | None
    text: str
    meaning: str = ""
    remedy: str = ""
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True)
class Context:
    """What a check is given, alike on all nodes and ranks.

    Attributes:
        config: the run's config file; None for the check's own small one.
        overrides: `KEY=VALUE` of `--set`, applied to the config.
        work: empty directory of this check, shared by all nodes.
        all_layouts: whether every layout is tried, and not only the config's (`--all`).
        limit_s: seconds after which the check is ended.
        processes: number of ranks of each node; 0 before the number of GPUs is known.
        node: name of the node on which this process runs.
        nodes: node -> address of all nodes that are checked, in order.
    """

    config: Path | None
    overrides: tuple[str, ...]
    work: Path
    all_layouts: bool
    limit_s: float
    processes: int = 0
    node: str = ""
    nodes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A check, which is a module with `run(context) -> Iterable[Finding]`.

    Attributes:
        name: its name in results and in `--only`.
        text: subject of the check, in one line, for people.
        module: name of its module; imported only where the check runs.
        place: where it runs.
        limit_s: seconds after which it is ended and reported as hanging, 60 to 120.
        needs: names of checks after whose failure this one is skipped.
        equal: whether its figures have to be the same on all nodes.
    """

    name: str
    text: str
    module: str
    place: Place
    limit_s: float = 60.0
    needs: Sequence[str] = ()
    equal: bool = False
