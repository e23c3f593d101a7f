"""Who does not answer while a run starts up; from the first step on the watchdog knows (`pipeline/faults`).

torch's waits for a process that was stopped have no end of their own. So each stage has a deadline, and ranks leave
notes: they have come, they have passed a check, they have given up. A rank that waits for one that waits for a third is
not to blame: who has not even given up when the others have is the one to look at. So that they give up together, they
begin together.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from headrace.base.cli import guarded, leave
from headrace.base.errors import ConfigError, HeadraceError, LostError
from headrace.base.processes import STOPPED, environment_of, siblings, state_of
from pipeline.launch.arrivals import Rendezvous, ask
from pipeline.launch.environment import detect

SETTLE_S = 3.0
"""Time in which ranks that give up together have all said so."""


class UnreachableError(LostError):
    """A rank does not answer. The process group cannot be closed any more, since its threads wait for that rank."""


def arrive(meeting: Rendezvous, when: str, *, within_s: float | None = None) -> None:
    """Waits in the store until all ranks are here.

    Args:
        meeting: of all ranks.
        when: words that complete "did not answer ...", the same on all ranks, and of this place only.
        within_s: the meeting's timeout when None.

    Raises:
        UnreachableError: names those that are not.
    """
    seconds = meeting.timeout_s if within_s is None else within_s

    def come() -> bool:
        meeting.store.set(f"{when}/{meeting.rank}", "1")
        if meeting.store.add(when, 1) == meeting.world_size:
            meeting.store.set(f"all {when}", "1")
        meeting.store.wait([f"all {when}"], timedelta(seconds=seconds))
        return True

    if not ask(come, otherwise=False, patience_s=seconds + 1.0):
        raise silence(meeting, blamed(meeting, when, meeting.everyone), when, "the others wait for it", seconds=seconds)


@contextmanager
def deadline(meeting: Rendezvous, when: str, *, passed: str | None = None, spare_s: float = 0.0) -> Iterator[None]:
    """Ends this process when it is still in here after the meeting's timeout; a broken connection ends it before.

    Args:
        meeting: of all ranks, which come to this place at about the same time.
        when: words that complete "did not answer ...".
        passed: the note of ranks that have left it; `when` itself when None.
        spare_s: more seconds, where something inside has the same limit and knows better what to say.

    Raises:
        UnreachableError: another rank has ended, which has perhaps given up a moment earlier.
    """
    limit_s, began = meeting.timeout_s + spare_s, time.monotonic()
    note = passed or when

    def error(said: str = "the others wait for it") -> UnreachableError:
        silent = blamed(meeting, note, meeting.everyone)
        return silence(meeting, silent, when, said, seconds=time.monotonic() - began)

    with ends_after(limit_s, error):
        try:
            yield
        except RuntimeError as broken:
            raise error(str(broken).splitlines()[0]) from None
        meeting.note(f"{note}/{meeting.rank}")


@contextmanager
def ends_after(seconds: float, error: Callable[[], HeadraceError]) -> Iterator[None]:
    """Ends this process with an error when it is still in the block after so many seconds."""

    def end() -> None:
        raise error()

    watch = threading.Timer(seconds, lambda: leave(guarded(end)))
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        watch.join()  # once it has begun to end this process, nothing else is to happen here


def blamed(meeting: Rendezvous, passed: str, ranks: Iterable[int]) -> list[int]:
    """Gives up; finds who has neither left the note `passed` nor given up, once all who wait have given up."""
    asked = list(ranks)
    if not meeting.note(f"gave-up/{meeting.rank}"):
        return [0]
    until = time.monotonic() + SETTLE_S
    while (silent := unheard(meeting, passed, asked)) and time.monotonic() < until:
        time.sleep(0.1)
    return silent


def unheard(meeting: Rendezvous, passed: str, ranks: Iterable[int]) -> list[int]:
    """Who has neither left the note `passed` nor given up by now."""
    not_passed = meeting.missing(passed, ranks)
    return meeting.missing("gave-up", not_passed) if not_passed else []


def silence(meeting: Rendezvous, silent: list[int], when: str, said: str, *, seconds: float) -> UnreachableError:
    """The error that names the silent ranks; those among them that are stopped on this host are ended.

    Args:
        meeting: of all ranks.
        silent: from `blamed`; when empty the network is.
        when: words that complete "did not answer ...".
        said: why this rank thinks so.
        seconds: that it has waited.
    """
    if silent:
        text = f"{meeting.where(silent)} did not answer {when} within {seconds:.1f} s\n  why: {said}\n"
        text += "  try: look at that host and at the rank's own error; start without it, or raise launch.timeout"
    else:
        text = f"all ranks are there, but did not reach each other {when}: {said}\n"
        text += "  try: let GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface that the hosts share"
    if meeting.rank == 0:
        time.sleep(SETTLE_S + 1.0)  # the others are reading their notes in this process
    kill_stopped(silent)
    return UnreachableError(text)


def kill_stopped(ranks: Collection[int]) -> None:
    """Kills those of the ranks that this process's launcher has started on this host, and that are stopped.

    They cannot end themselves, and torchrun and deepspeed would wait 30 s for that.
    """
    own = detect()
    for pid in siblings():
        with suppress(OSError, ConfigError):
            other = detect(environment_of(pid), parent=os.getppid())
            same = (other.launcher, other.master) == (own.launcher, own.master)
            if same and other.rank in ranks and state_of(pid)[0] == STOPPED:
                os.kill(pid, signal.SIGKILL)
