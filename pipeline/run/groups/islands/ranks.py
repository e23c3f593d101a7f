"""Common decisions of an island's ranks in an exchange: in the training loop or in a concurrent thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from pipeline.run.groups.islands.context import IslandContext
from pipeline.runtime.faults.stop_signals import Stop
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of one island. Every method is collective over them."""

    def from_first(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0; returns its result, or raises its error, on all ranks."""
        ...

    def agreed(self, flag: bool) -> bool:
        """Tells whether `flag` is true on any rank."""
        ...

    def stopped(self) -> bool:
        """Tells whether to give up an exchange that waits for other islands."""
        ...

    def asked(self) -> bool:
        """Tells whether this rank was asked to give up the exchange. Not collective."""
        ...


class LoopRanks:
    """The ranks in the training loop, over the default process group; a stop signal ends waiting.

    Args:
        context: the island's rank and run.

    Attributes:
        stop: the stop that was requested.
    """

    def __init__(self, context: IslandContext) -> None:
        self._context, self.stop = context, Stop.NO

    def from_first(self, action: Callable[[], T]) -> T:
        """Implements `Ranks.from_first`."""
        self._context.watchdog.report_progress()
        return on_rank_zero(action)

    def agreed(self, flag: bool) -> bool:
        """Implements `Ranks.agreed`."""
        return bool(self._context.agreement.max_over_ranks(int(flag))[0])

    def stopped(self) -> bool:
        """Implements `Ranks.stopped`."""
        self.stop = self._context.agreement.requested_stop(self._context.signals)
        return bool(self.stop)

    def asked(self) -> bool:
        """Implements `Ranks.asked`."""
        return bool(self._context.signals.requested)


class ThreadRanks:
    """The ranks in a thread, over a group of its own: its collectives must not mix with the training loop's.

    Args:
        group: gloo process group over all ranks of the island; None for one process.
        cancelled: set on all ranks when the exchange is to be given up.
    """

    def __init__(self, group: Any, cancelled: threading.Event) -> None:
        self._group, self._cancelled = group, cancelled

    def from_first(self, action: Callable[[], T]) -> T:
        """Implements `Ranks.from_first`."""
        return action() if self._group is None else on_rank_zero(action, group=self._group)

    def agreed(self, flag: bool) -> bool:
        """Implements `Ranks.agreed`."""
        if self._group is None:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return bool(value)

    def stopped(self) -> bool:
        """Implements `Ranks.stopped`."""
        return self.agreed(self._cancelled.is_set())

    def asked(self) -> bool:
        """Implements `Ranks.asked`."""
        return self._cancelled.is_set()


def thread_group() -> Any:
    """Makes a process group for `ThreadRanks`; None for one process. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", group_desc="islands")
