"""Variables and modules that a job sets up before its script begins, from a site's settings."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.submission.site import SiteConfig


def settings_of(site: SiteConfig, *, root: Path, directory: Path) -> list[str]:
    """Lines of bash that a job runs before its script begins.

    Args:
        root: HEADRACE_ROOT, the directory with slurm/env.sh.
        directory: directory of the submission.
    """
    return [
        "# The settings of this submission.",
        *_variables(site, root),
        *_modules(site),
        *_container(site, directory),
    ]


def _variables(site: SiteConfig, root: Path) -> Iterator[str]:
    interface = site.interface
    own = {
        "HEADRACE_ROOT": str(root),
        "HEADRACE_VENV": venv_of(site),
        "HEADRACE_SWEEP": "resolved",  # slurm/sweep.sh: an element's config is complete
        **({} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}),
        **site.environment,
    }
    yield from (f"export {name}={shlex.quote(value)}" for name, value in own.items())


def venv_of(site: SiteConfig) -> str:
    """The virtual environment of the jobs; empty for the python on their PATH."""
    if site.venv is not None:
        return str(Path(site.venv).absolute())
    has_own = bool(site.modules) or site.container is not None or not (Path(sys.prefix) / "bin" / "activate").is_file()
    return "" if has_own else sys.prefix


def _modules(site: SiteConfig) -> Iterator[str]:
    if site.modules:
        yield "command -v module > /dev/null || source /etc/profile # where sites define it"
        yield f"module load {shlex.join(site.modules)} || exit 2"
    for name in [] if site.container else site.mounts:
        place = shlex.quote(name)
        yield f'[ -d {place} ] || {{ echo "error: $(hostname) has no "{place} >&2; exit 2; }}'


def _container(site: SiteConfig, directory: Path) -> Iterator[str]:
    """Lines that put a `python` first on PATH that starts the Apptainer image; Pyxis has sbatch options instead."""
    if site.container is None or site.container.runtime != "apptainer":
        return
    tools = directory / "bin"
    binds = [str(Path.cwd()), *site.mounts]
    command = ["exec", "apptainer", "exec", "--nv", "--bind", ",".join(binds), site.container.image, "python"]
    place, python = shlex.quote(str(tools)), shlex.quote(str(tools / "python"))
    yield f"mkdir -p {place}"
    text = f'#!/bin/sh\\n{shlex.join(command)} "$@"\\n'
    yield f"printf '%b' {shlex.quote(text)} > {python} && chmod +x {python}"
    yield f"export PATH={place}:$PATH"
