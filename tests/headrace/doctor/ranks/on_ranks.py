"""A check on every rank of a persistent group, with a fault put into one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from foundation.errors import LostError
from headrace.doctor.check import Context, Finding

BAD = 2
"""The rank with the fault."""


def check(rank: int, name: str, work: str, config: str | None, fault: str | None, limit_s: float) -> list[Any]:
    """The findings of a check on this rank."""
    context = Context(Path(config) if config else None, (), Path(work), False, limit_s)
    with ExitStack() as stack:
        if fault is not None:
            stack.enter_context(FAULTS[fault](rank))
        try:
            return [asdict(each) for each in import_module(f"headrace.doctor.checks.{name}").run(context)]
        except LostError as error:  # the runner makes a finding of it (`headrace.doctor.rank`)
            return [asdict(Finding(False, str(error)))]


@contextmanager
def sleeps(rank: int) -> Iterator[None]:
    if rank == BAD:
        time.sleep(7.0)  # past the limit of 1 s, and the 3 s in which ranks give up
    yield


@contextmanager
def slow_pair(rank: int) -> Iterator[None]:
    """Messages from one rank to another take at least 50 ms: a link of 20 MB/s."""
    real = dist.send

    def send(tensor: torch.Tensor, to: int, **options: Any) -> None:
        if (rank, to) == (BAD, 0) and tensor.numel() > 1:
            time.sleep(tensor.nbytes / 20e6)
        real(tensor, to, **options)

    with mock.patch.object(dist, "send", send):
        yield


@contextmanager
def swapped_splits(rank: int) -> Iterator[None]:
    """The parts of an uneven all-to-all arrive on one rank in another order."""
    real = dist.all_to_all_single

    def all_to_all(received: torch.Tensor, *arguments: Any) -> None:
        real(received, *arguments)
        if rank == BAD:
            received.copy_(received.flip(0))

    with mock.patch.object(dist, "all_to_all_single", all_to_all):
        yield


def _backward_of(module: str, name: str, change: Callable[..., Any]) -> Callable[[int], Any]:
    """On one rank, a function's result is changed."""

    @contextmanager
    def fault(rank: int) -> Iterator[None]:
        owner = import_module(f"pipeline.engines.parallel.{module}")
        real = getattr(owner, name)

        def changed(*arguments: Any, **options: Any) -> Any:
            return change(real(*arguments, **options))

        with mock.patch.object(owner, name, changed) if rank == BAD else ExitStack():
            yield

    return fault


FAULTS: dict[str, Callable[[int], Any]] = {
    "sleeps": sleeps,
    "slow pair": slow_pair,
    "swapped splits": swapped_splits,
    "half a gradient": _backward_of("ring", "attention_backward", lambda parts: (parts[0], parts[1] / 2, parts[2])),
    "swapped gradients": _backward_of("ring", "attention_backward", lambda parts: (parts[0], parts[2], parts[1])),
    "swapped chunks": _backward_of("context", "_exchanged", lambda tensor: tensor.flip(1)),
}


def failed(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in findings if asdict(Finding(**each))["passed"] is False]
