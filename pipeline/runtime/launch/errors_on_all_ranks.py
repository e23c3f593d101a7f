"""Raises one rank's error on every rank, by collectives: no rank waits for a failed one.

This is for work of seconds; `wait_for_rank_zero` is for work longer than the timeout of a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from foundation.errors import CheckpointError, HeadraceError

T = TypeVar("T")


def on_rank_zero(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Runs `action` on rank 0 and broadcasts its result, or raises its error on all ranks. Collective.

    Args:
        action: function to run on rank 0.
        group: a group of all ranks, for use in a thread other than the default process group's.
    """
    outcome: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except HeadraceError as error:
            outcome[1] = error
        except OSError as error:
            outcome[1] = CheckpointError(f"{error}\n  try: free space or fix the permissions, then start again")
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def raise_on_all_ranks(failure: str | None, what: str) -> None:
    """Raises CheckpointError on all ranks when `failure` is not None on any. Collective."""
    failures: list[str | None] = [failure]
    if dist.is_initialized():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
    for rank, each in enumerate(failures):
        if each is not None:
            raise CheckpointError(f"{what}: rank {rank}: {each}\n  try: free space there, then start again: it resumes")
