"""Rendezvous of the ranks of a run: a key-value store in which ranks set flags for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
RUN_FINISHED = "headrace/over"
"""Key that rank 0 sets when the run is finished, for spare ranks."""
RUN_STOPPED = "stopped"
"""Rank 0's flag that the run will be started again; spare ranks then exit, too."""
_SHOWN = 8
"""Number of ranks that are listed in full."""


@dataclass(frozen=True)
class Rendezvous:
    """The store of the ranks of a run, and this rank's place among them.

    Attributes:
        rank: this process's rank.
        world_size: number of ranks.
        store: key-value store in rank 0's process, or in torchrun's.
        timeout_s: seconds for which ranks wait for each other at the start.
        rank_zero_host: rank 0's host name, for messages about a store that does not answer.
        ranks_here: number of ranks on this rank's host.
    """

    rank: int
    world_size: int
    store: Store
    timeout_s: float
    rank_zero_host: str = "?"
    ranks_here: int = 1

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.world_size)

    def set_flag(self, key: str) -> bool:
        """Sets a flag; returns False, without effect, when the store is gone."""

        def set_key() -> bool:
            self.store.set(key, "1")
            return True

        return store_call(set_key, default=False)

    def mark(self, flag: str) -> bool:
        """Sets this rank's own flag, read by `ranks_without`; returns False when the store is gone."""

        def append() -> bool:
            mark(self.store, flag, self.rank)
            return True

        return store_call(append, default=False)

    def ranks_without(self, flag: str, ranks: Iterable[int]) -> list[int]:
        """Returns the ranks that have not marked `flag`; only rank 0 when the store itself does not answer.

        It takes two requests for any number of ranks: with one request per rank, 512 ranks that all ask would take 5 s.
        """

        def read() -> list[int]:
            key = _marks(flag)
            marked = set(self.store.get(key).split()) if self.store.check([key]) else set()
            return [rank for rank in candidates if str(rank).encode() not in marked]

        candidates = list(ranks)
        return store_call(read, default=[0])

    def describe(self, ranks: Iterable[int]) -> str:
        """Formats ranks with their hosts, e.g. "rank 4 on node07, rank 5 on node07"."""
        listed = list(ranks)
        hosts = self._hosts(listed[:_SHOWN])
        shown = [f"rank {rank} on {hosts.get(rank, '?')}" for rank in listed[:_SHOWN]]
        return ", ".join(shown) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")

    def hosts(self) -> dict[int, str]:
        """Reads rank -> host in one request, once all ranks have joined; only rank 0's if the store does not answer."""
        others = [rank for rank in self.ranks if rank]

        def read() -> list[bytes]:
            return self.store.multi_get([f"host/{rank}" for rank in others])

        none: list[bytes] = []
        found = store_call(read, default=none) if others else none
        return {0: self.rank_zero_host} | {
            r: name.decode(errors="replace") for r, name in zip(others, found, strict=False)
        }

    def _hosts(self, ranks: Iterable[int]) -> dict[int, str]:
        """Reads rank -> host of the joined ranks in one call, since a store that does not answer takes time."""
        keys = {rank: f"host/{rank}" for rank in ranks if rank}

        def read() -> dict[int, str]:
            return {
                rank: self.store.get(key).decode(errors="replace")
                for rank, key in keys.items()
                if self.store.check([key])
            }

        none: dict[int, str] = {}
        return {0: self.rank_zero_host} | (store_call(read, default=none) if keys else none)


def mark(store: Store, flag: str, rank: int) -> None:
    """Sets a rank's flag: all ranks append their number to the value of `flag`."""
    store.append(_marks(flag), f"{rank} ")  # type: ignore[attr-defined]  # torch has no type for it


def _marks(flag: str) -> str:
    return f"{flag}/ranks"


def store_call(request: Callable[[], T], *, default: T, timeout_s: float = 5.0) -> T:
    """Returns the result of a request to the store, or `default` when the store is gone or does not answer.

    A request to a store whose process is stopped (SIGSTOP) blocks forever: so each request runs in a thread, which is
    abandoned then.
    """
    results: list[T] = []

    def call() -> None:
        try:
            results.append(request())
        except RuntimeError:  # the connection is gone
            results.append(default)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return results[0] if results else default


def format_ranks(numbers: Iterable[int]) -> str:
    """Formats ranks for a message: "rank 4", "ranks 2, 3"."""
    ranks = list(numbers)
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN]) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
