"""Processes that a layout has no place for: they wait, and go when the run is over.

They do not leave at once. A task of srun that ends early has the others killed (`srun --wait`), and a torchrun agent
whose workers have all ended is lost to the run: when another node fails it does not join the next round, though its
spare processes are what the run then needs.

Asked to stop, a spare process leaves with the ranks that train, once these have saved themselves. Only torchrun ends
processes by themselves, to start them again with others: there it leaves at once.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pipeline.config.schema import LaunchSection
from pipeline.launch.arrivals import OVER, STOPPED
from pipeline.launch.environment import Launch
from pipeline.launch.store import open_store

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 0.5
_ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_ENDS = (OVER, f"headrace/notes/{STOPPED}")
"""Notes after which nothing is left to wait for; `Meeting` leaves the second one."""


def stand_by(launch: Launch, *, processes: int, config: LaunchSection) -> None:
    """Waits until the ranks that train have finished, have saved themselves, or have gone.

    Args:
        launch: of this process, whose rank has no place.
        processes: ranks that train.
        config: how long to wait for rank 0, at first and whenever it does not answer.

    Raises:
        TrainingError: rank 0 never came.
    """
    with _asked_to_stop() as asked, _looking(open_store(launch, config.timeout)) as end:
        place = f"the layout takes {processes} of {launch.world_size} processes"
        print(f"rank {launch.rank} is spare: {place}", file=sys.stderr, flush=True)
        while not end.over.wait(_POLL_S) and not (asked and launch.launcher == "torchrun"):
            if end.silence_s() > config.timeout:
                silence = f"rank 0 has not answered for {config.timeout:g} s"
                print(f"rank {launch.rank} is spare, and leaves: {silence}", file=sys.stderr, flush=True)
                return


class _End(threading.Thread):
    """Looks for the end of the run in a thread of its own: a store whose process is stopped lets a question wait."""

    def __init__(self, store: Store) -> None:
        super().__init__(name="spare", daemon=True)
        self._store, self._heard = store, time.monotonic()
        self.over = threading.Event()

    def run(self) -> None:
        """Until a note tells it, or the store has gone, which lives in rank 0 or in torchrun."""
        with suppress(RuntimeError):
            while not any(self._store.check([note]) for note in _ENDS):
                self._heard = time.monotonic()
                if self.over.wait(_POLL_S):
                    return
        self.over.set()

    def silence_s(self) -> float:
        """Seconds since the store answered."""
        return time.monotonic() - self._heard


@contextmanager
def _looking(store: Store) -> Iterator[_End]:
    """Looks for the end of the run as long as the block lasts."""
    end = _End(store)
    end.start()
    try:
        yield end
    finally:
        end.over.set()
        end.join(2 * _POLL_S)  # in vain where the store does not answer


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that is empty until a signal asks this process to stop."""
    asked: list[int] = []
    before = {which: signal.signal(which, lambda number, _frame: asked.append(number)) for which in _ASKED}
    try:
        yield asked
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
