"""How the ranks of an island decide alike in an exchange: in the training loop, or in a thread beside it."""

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
        """What `action` returns or raises on rank 0, on all ranks."""
        ...

    def agreed(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        ...

    def stopped(self) -> bool:
        """Whether an exchange that waits for other islands is to be given up."""
        ...

    def asked(self) -> bool:
        """The same on this rank alone. Not collective."""
        ...


class LoopRanks:
    """In the training loop: over the default process group; a stop signal ends waiting.

    Args:
        context: the island's rank and run.

    Attributes:
        stop: the stop that was requested.
    """

    def __init__(self, context: IslandContext) -> None:
        self._context, self.stop = context, Stop.NO

    def from_first(self, action: Callable[[], T]) -> T:
        """See `Ranks`."""
        self._context.watchdog.report_progress()
        return on_rank_zero(action)

    def agreed(self, flag: bool) -> bool:
        """See `Ranks`."""
        return bool(self._context.agreement.max_over_ranks(int(flag))[0])

    def stopped(self) -> bool:
        """See `Ranks`."""
        self.stop = self._context.agreement.requested_stop(self._context.signals)
        return bool(self.stop)

    def asked(self) -> bool:
        """See `Ranks`."""
        return bool(self._context.signals.requested)


class ThreadRanks:
    """In a thread beside the training loop, whose collectives must not meet those of the thread: over another group.

    Args:
        group: of gloo, over all ranks of the island; None for one process.
        cancelled: set on all ranks when the exchange is to be given up.
    """

    def __init__(self, group: Any, cancelled: threading.Event) -> None:
        self._group, self._cancelled = group, cancelled

    def from_first(self, action: Callable[[], T]) -> T:
        """See `Ranks`."""
        return action() if self._group is None else on_rank_zero(action, group=self._group)

    def agreed(self, flag: bool) -> bool:
        """See `Ranks`."""
        if self._group is None:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return bool(value)

    def stopped(self) -> bool:
        """See `Ranks`."""
        return self.agreed(self._cancelled.is_set())

    def asked(self) -> bool:
        """See `Ranks`."""
        return self._cancelled.is_set()


def thread_group() -> Any:
    """A process group for `ThreadRanks`. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", group_desc="islands")
