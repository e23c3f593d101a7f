"""The notes that the ranks of a run leave for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
OVER = "headrace/over"
"""The note that rank 0 leaves when all is done, for processes that wait beside the run."""
STOPPED = "stopped"
"""Rank 0's note that the run is to be started again: spare ranks wait for that."""
_SHOWN = 8
"""Ranks that are listed in full."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a run leave notes for each other.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        store: the notes; it lives in rank 0's process, or in torchrun's.
        timeout_s: how long ranks wait for each other at start.
        first_host: rank 0's host, to be named when its store does not answer.
    """

    rank: int
    world_size: int
    store: Store
    timeout_s: float
    first_host: str = "?"

    @property
    def everyone(self) -> range:
        """All ranks."""
        return range(self.world_size)

    def note(self, key: str) -> bool:
        """Leaves a note; False, and without effect, when the store is gone."""

        def leave() -> bool:
            self.store.set(key, "1")
            return True

        return ask(leave, otherwise=False)

    def missing(self, key: str, ranks: Iterable[int]) -> list[int]:
        """The ranks that have not left the note `key/RANK`; only rank 0 when the store itself does not answer."""
        wanted = list(ranks)
        return ask(lambda: [r for r in wanted if not self.store.check([f"{key}/{r}"])], otherwise=[0])

    def where(self, ranks: Iterable[int]) -> str:
        """Ranks and their hosts in words, e.g. "rank 4 on node07, rank 5 on node07"."""
        known = list(ranks)
        hosts = self._hosts(known[:_SHOWN])
        shown = [f"rank {rank} on {hosts.get(rank, '?')}" for rank in known[:_SHOWN]]
        return ", ".join(shown) + (f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else "")

    def _hosts(self, ranks: Iterable[int]) -> dict[int, str]:
        """Rank -> host, of those that have come; in one question, for a store that does not answer takes time."""

        keys = {rank: f"host/{rank}" for rank in ranks if rank}

        def look() -> dict[int, str]:
            return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}

        none: dict[int, str] = {}
        return {0: self.first_host} | (ask(look, otherwise=none) if keys else none)


def ask(question: Callable[[], T], *, otherwise: T, patience_s: float = 5.0) -> T:
    """The answer of the store, or `otherwise` when it has gone or does not answer.

    A store whose process was stopped lets a question wait for ever: it is asked in a thread that is left behind.
    """
    answers: list[T] = []

    def put() -> None:
        try:
            answers.append(question())
        except RuntimeError:  # the connection is gone
            answers.append(otherwise)

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    thread.join(patience_s)
    return answers[0] if answers else otherwise


def listed(numbers: Iterable[int]) -> str:
    """Ranks in words: "rank 4", "ranks 2, 3"."""
    ranks = list(numbers)
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN]) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
