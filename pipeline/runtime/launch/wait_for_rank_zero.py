"""Runs work on rank 0 alone; the other ranks wait for its result outside of collectives, which would time out.

While it works, rank 0 increments a heartbeat counter in the rendezvous store, which the other ranks poll. So they
notice a dead or hung rank 0, but wait hours for a working one. An error of rank 0 is raised on all ranks.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from foundation.errors import HeadraceError, LostError, TrainingError
from pipeline.runtime.launch.rendezvous import Rendezvous, store_call

T = TypeVar("T")
BEAT_S, SILENCE_S, LOOK_S = 2.0, 120.0, 0.2
"""Seconds between heartbeats; seconds without a heartbeat after which rank 0 counts as lost; seconds between two polls
of the store."""
_LOOKS_PER_SECOND = 4096
"""Largest number of polls of the store per second, all ranks together; the store is in rank 0's process."""
_GONE = -1  # replaces the heartbeat count if the store does not answer
_SEEN_S = 10.0
"""Seconds that rank 0 waits for the others to read its result or error."""


def wait_for_rank_zero(work: Callable[[], T], rendezvous: Rendezvous, *, what: str, silence_s: float = SILENCE_S) -> T:
    """Runs `work` on rank 0 and returns its result on all ranks. Every rank calls it.

    Args:
        work: function to run on rank 0, whose result can be pickled.
        rendezvous: rendezvous of all ranks.
        what: name of the work in messages, e.g. "measuring latencies"; used only once per rendezvous.
        silence_s: seconds without a heartbeat after which rank 0 counts as lost.

    Raises:
        HeadraceError: error of rank 0's work, raised on all ranks.
        TrainingError: rank 0's work raised an error of another class; rank 0 itself raises the original.
        LostError: rank 0 has died, or does not answer.
    """
    if rendezvous.rank == 0:
        return _work(work, rendezvous, what)
    result, error = _wait_for_result(rendezvous, what, silence_s)
    rendezvous.mark(f"{what}/seen")
    if error is not None:
        raise error
    return cast("T", result)


def _work(work: Callable[[], T], rendezvous: Rendezvous, what: str) -> T:
    try:
        with _heartbeat(rendezvous, what):
            result = work()
    except BaseException as error:
        told: Exception = TrainingError(f"rank 0 failed while {what}: {error!r}\n  try: see its own message")
        if isinstance(error, HeadraceError):
            told = error
        _publish(rendezvous, what, (None, told))
        raise
    _publish(rendezvous, what, (result, None))
    return result


def _publish(rendezvous: Rendezvous, what: str, outcome: tuple[object, Exception | None]) -> None:
    """Publishes the outcome and waits until the others have read it, since the store may end with this process."""
    rendezvous.store.set(f"{what}/result", pickle.dumps(outcome).hex())
    deadline = time.monotonic() + _SEEN_S
    while rendezvous.ranks_without(f"{what}/seen", rendezvous.ranks[1:]) and time.monotonic() < deadline:
        time.sleep(LOOK_S)


@contextmanager
def _heartbeat(rendezvous: Rendezvous, what: str) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_S):
            store_call(lambda: rendezvous.store.add(f"{what}/beat", 1), default=0)

    thread = threading.Thread(target=beat, name="rank-zero-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _wait_for_result(rendezvous: Rendezvous, what: str, silence_s: float) -> tuple[object, Exception | None]:
    last, heard = -1, time.monotonic()
    while True:
        if store_call(lambda: rendezvous.store.check([f"{what}/result"]), default=False):
            found: tuple[object, Exception | None] = pickle.loads(
                bytes.fromhex(rendezvous.store.get(f"{what}/result").decode())
            )
            return found
        beat = store_call(lambda: rendezvous.store.add(f"{what}/beat", 0), default=_GONE)
        now = time.monotonic()
        last, heard = (beat, now) if beat not in (last, _GONE) else (last, heard)
        if now - heard > silence_s:
            raise LostError(
                f"{rendezvous.describe([0])} did not answer for {silence_s:g} s while {what}\n"
                f"  try: see its own message, then start again"
            )
        time.sleep(BEAT_S if beat == _GONE else look_s(rendezvous.world_size))


def look_s(world_size: int) -> float:
    """Returns the seconds between two polls of a waiting rank."""
    return max(LOOK_S, world_size / _LOOKS_PER_SECOND)
