"""The checks of `headrace doctor` in their order: cheap ones whose failure makes all others pointless come first."""

from __future__ import annotations

from collections.abc import Iterable

from foundation.errors import ConfigError
from foundation.section import suggest
from headrace.doctor.check import Check, Place

GPUS = "gpus"
"""Name of the check that counts the GPUs of a node, in its figure of the same name."""
_HERE = "headrace.doctor.checks."


def _check(
    name: str, text: str, module: str, place: Place = "node", *, limit_s: float = 60.0, needs: tuple[str, ...] = (GPUS,)
) -> Check:
    return Check(name, text, f"{_HERE}{module}", place, limit_s, needs)


_RANKS = (GPUS, "connection")
"""Checks without which ranks would only wait for each other."""
_TRAINING = (*_RANKS, "compilers", "config")
"""Checks without which a training would end in its first minute."""

CHECKS = (
    _check(GPUS, "driver against torch's CUDA, number of GPUs, MIG, twins", "gpus", needs=()),
    _check("machine", "NVLink, persistence mode, locked memory, ninja", "machine", needs=()),
    _check("nodes", "memory, disks, ECC, device, links and clocks", "nodes", limit_s=90.0, needs=()),
    _check("versions", "torch, CUDA, driver, NCCL, DeepSpeed: equal on all nodes", "versions", needs=()),
    _check("compilers", "C compiler, Python.h, a Triton or C++ kernel of Inductor", "compilers", limit_s=120.0),
    _check("config", "data, model, features and space that the config needs", "config", limit_s=120.0),
    _check("connection", "eager connection of all ranks and of the config's splits", "ranks_connection", "ranks"),
    _check("bandwidth", "bandwidth of the collectives, the slow pair", "ranks_bandwidth", "ranks", needs=_RANKS),
    _check("attention", "ring and Ulysses attention against one rank", "ranks_attention", "ranks", needs=_RANKS),
    _check(
        "gradients",
        "losses and gradients of the layout against one process",
        "trainings_gradients",
        "launcher",
        limit_s=120.0,
        needs=_TRAINING,
    ),
    _check(
        "schedules",
        "time of pipeline schedules against their simulation",
        "trainings_schedules",
        "launcher",
        limit_s=120.0,
        needs=_TRAINING,
    ),
    _check(
        "save and resume",
        "a save during steps, a resume in another layout, bit for bit",
        "trainings_resume",
        "launcher",
        limit_s=120.0,
        needs=_TRAINING,
    ),
    _check(
        "lost ranks",
        "killed, stopped and endless ranks are named, and the run starts again",
        "trainings_lost_ranks",
        "launcher",
        limit_s=120.0,
        needs=_TRAINING,
    ),
    _check(
        "plan",
        "20 steps of the config: memory and MFU against the plan",
        "trainings_plan",
        "launcher",
        limit_s=120.0,
        needs=_TRAINING,
    ),
)


def selected(checks: Iterable[Check], names: Iterable[str]) -> list[Check]:
    """Returns the named checks in the table's order, all without names.

    Raises:
        ConfigError: there is no check of a name.
    """
    checks, names = list(checks), list(names)
    known = [check.name for check in checks]
    for name in names:
        if name not in known:
            near = suggest(name, known)
            remedy = f"did you mean '{near}'?" if near else "headrace doctor --list"
            raise ConfigError("--only", name, why="there is no check of this name", remedy=remedy)
    return [check for check in checks if not names or check.name in names]
