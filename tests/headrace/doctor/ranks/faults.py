"""Faults put into the trainings of a check: patches that the forked ranks inherit, or other programs and files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import flip_a_byte

_MORE = 1000 << 20
"""Bytes that a training takes beside its own: more than the plan of a CPU leaves (0.4 of 1.1 GiB are in use)."""
_BALLAST = f"import runpy; ballast = b'1' * {_MORE}; runpy.run_module('pipeline.train', run_name='__main__')"


def _module(name: str) -> Any:
    return import_module(name)


def swapped_gradients() -> None:
    """Ring attention's gradients of keys and values are exchanged on rank 1."""
    ring = _module("pipeline.engines.parallel.ring")
    real = ring.attention_backward

    def backward(*arguments: Any, **options: Any) -> Any:
        query, key, value = real(*arguments, **options)
        return (query, value, key) if dist.get_rank() == 1 else (query, key, value)

    ring.attention_backward = backward


@torch.library.custom_op("tests::slow", mutates_args=())
def slow(value: torch.Tensor) -> torch.Tensor:
    """An operator that takes 2 ms, as on a device at a fraction of its clock."""
    time.sleep(0.002)
    return value.clone()


def slow_rank() -> None:
    """In the second case, every layer of rank 1 takes 2 ms more."""
    rank = _module("pipeline.plan.proof.rank")
    real = rank.build_engine

    def build(run: Any, *arguments: Any, **options: Any) -> Any:
        if dist.get_rank() == 1 and run.config.parallel.schedule == "gpipe":
            hook = torch.nn.modules.module.register_module_forward_pre_hook
            hook(lambda module, _: None if [*module.children()] else slow(torch.ones(1)) and None)
        return real(run, *arguments, **options)

    rank.build_engine = build


def damaged_checkpoint() -> None:
    """A bit of a weight is flipped after the checkpoint was written."""
    check = _module("headrace.doctor.checks.trainings_resume")
    real = check.finish

    def finish(training: Any, folder: Path, *, within_s: float) -> None:
        real(training, folder, within_s=within_s)
        files = sorted((folder / "run/checkpoints/step-00000004").rglob("*"), key=lambda each: each.stat().st_size)
        flip_a_byte(files[-1])

    check.finish = finish


def changed_moment() -> None:
    """A moment of the optimizer has another value after loading than in the checkpoint."""
    named_state = _module("pipeline.checkpoint.named_state")
    real = named_state.read

    def read(state: Any, directory: Path, **options: Any) -> None:
        real(state, directory, **options)
        moment = next(value for key, value in state.items() if key.startswith("exp_avg_sq/"))
        for part in moment.parts.values():
            part.mul_(1.5)

    named_state.read = read


def no_watchdog() -> None:
    """The runs have no watchdog; only a rank that is stopped is tried, for 6 s."""
    check = _module("headrace.doctor.checks.trainings_lost_ranks")
    check.WATCHDOG = {"enabled": False}
    check.OUT_S, check._FAULTS = 6.0, dict(list(check._FAULTS.items())[1:3])


def more_memory() -> None:
    """The training takes memory that the plan does not know, and an allocator that had to retry (no CPU has one)."""
    check = _module("headrace.doctor.checks.trainings_plan")
    start, read = check.start, check.read_measured
    check.start = lambda *given, **options: start(*given, **options, script=("-c", _BALLAST))

    def read_measured(path: Path) -> Any:
        found = read(path)
        retries: Mapping[str, Any] = {"allocator_retries": [3]}
        return replace(found, record={**found.record, "memory": {**found.record["memory"], **retries}})

    check.read_measured = read_measured


FAULTS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (swapped_gradients, slow_rank, damaged_checkpoint, changed_moment, no_watchdog, more_memory)
}
