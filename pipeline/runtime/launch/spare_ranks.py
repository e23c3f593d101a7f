"""Spare ranks: processes that the layout does not use wait until the run is over, and exit with it.

They do not exit at once. srun kills the other tasks when one exits early (`srun --wait`), and a torchrun agent whose
workers have all exited is lost to the run. When another node fails, that agent does not join the next rendezvous,
though the run then needs its spare processes.

On a stop signal, a spare rank exits with the ranks that train, once these have saved their checkpoint. Only torchrun
signals single processes, to restart them with others: under torchrun a spare rank exits at once.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pipeline.config.sections.run import LaunchSection
from pipeline.runtime.launch.environment import Launch
from pipeline.runtime.launch.rendezvous import RUN_FINISHED, RUN_STOPPED
from pipeline.runtime.launch.store import open_store

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 0.5
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_END_KEYS = (RUN_FINISHED, f"headrace/notes/{RUN_STOPPED}")
"""Keys that end the wait; the second one is set through `Rendezvous.set_flag`."""


def wait_as_spare(launch: Launch, *, processes: int, config: LaunchSection) -> None:
    """Waits until the ranks that train have finished, have saved and stopped, or are gone.

    Args:
        launch: launch of this process, whose rank the layout does not use.
        processes: number of ranks that train.
        config: section `launch`, with the time to wait for rank 0, at first and whenever it does not answer.

    Raises:
        TrainingError: rank 0 did not join.
    """
    with _stop_requests() as requests, _polling(open_store(launch, config.timeout)) as poller:
        reason = f"the layout takes {processes} of {launch.world_size} processes"
        print(f"rank {launch.rank} is spare: {reason}", file=sys.stderr, flush=True)
        while not poller.run_ended.wait(_POLL_S) and not (requests and launch.launcher == "torchrun"):
            if poller.silence_s() > config.timeout:
                reason = f"rank 0 has not answered for {config.timeout:g} s"
                print(f"rank {launch.rank} is spare, and exits: {reason}", file=sys.stderr, flush=True)
                return


class _EndPoller(threading.Thread):
    """Polls for the end of the run in a thread of its own, since a request blocks if the store's process is stopped."""

    def __init__(self, store: Store) -> None:
        super().__init__(name="spare", daemon=True)
        self._store, self._last_answer = store, time.monotonic()
        self.run_ended = threading.Event()

    def run(self) -> None:
        """Polls until an end key is set, or the store (in rank 0 or in torchrun) is gone."""
        with suppress(RuntimeError):
            while not any(self._store.check([key]) for key in _END_KEYS):
                self._last_answer = time.monotonic()
                if self.run_ended.wait(_POLL_S):
                    return
        self.run_ended.set()

    def silence_s(self) -> float:
        """Returns the seconds since the store's last answer."""
        return time.monotonic() - self._last_answer


@contextmanager
def _polling(store: Store) -> Iterator[_EndPoller]:
    """Polls for the end of the run until the block ends."""
    poller = _EndPoller(store)
    poller.start()
    try:
        yield poller
    finally:
        poller.run_ended.set()
        poller.join(2 * _POLL_S)  # times out if the store does not answer


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Yields a list that gets the stop signals as they arrive."""
    requests: list[int] = []
    previous = {s: signal.signal(s, lambda number, _frame: requests.append(number)) for s in _STOP_SIGNALS}
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
