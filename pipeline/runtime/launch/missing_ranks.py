"""Barriers and deadlines of the start-up that name missing ranks; from the first step on the watchdog does this.

torch's waits for a process that was stopped (SIGSTOP) never time out. So each stage has a deadline, and ranks set flags
in the rendezvous store: joined, passed a check, given up. A rank may wait for a rank that itself waits for a third one.
So only ranks that have not even given up when the others have are at fault. All ranks begin a stage together, and so
give up together.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from foundation.cli import guarded, leave
from foundation.errors import ConfigError, HeadraceError, LostError
from foundation.processes import STOPPED, environment_of, siblings, state_of
from pipeline.runtime.launch.environment import detect
from pipeline.runtime.launch.rendezvous import Rendezvous, mark, store_call

SETTLE_S = 3.0
"""Seconds for all ranks that give up together to set their flags."""
_ASKED_PER_SECOND = 4096
"""Largest rate of requests (per second, all ranks) that ask the store which ranks have given up."""


class UnreachableError(LostError):
    """A rank does not answer. The process group can no longer be closed, since its threads wait for that rank."""


def barrier(rendezvous: Rendezvous, when: str, *, timeout_s: float | None = None) -> None:
    """Waits in the store until all ranks have reached this barrier.

    Args:
        rendezvous: rendezvous of all ranks.
        when: words that complete "did not answer ...", the same on all ranks, and used by this barrier only.
        timeout_s: timeout in seconds; None for the timeout of the rendezvous.

    Raises:
        UnreachableError: some ranks have not reached the barrier; the error names them.
    """
    seconds = rendezvous.timeout_s if timeout_s is None else timeout_s

    def wait() -> bool:
        mark(rendezvous.store, when, rendezvous.rank)
        if rendezvous.store.add(when, 1) == rendezvous.world_size:
            rendezvous.store.set(f"all {when}", "1")
        rendezvous.store.wait([f"all {when}"], timedelta(seconds=seconds))
        return True

    if not store_call(wait, default=False, timeout_s=seconds + 1.0):
        missing = give_up(rendezvous, when, rendezvous.ranks)
        raise unreachable(rendezvous, missing, when, "the others wait for it", seconds=seconds)


@contextmanager
def deadline(
    rendezvous: Rendezvous, when: str, *, passed_flag: str | None = None, extra_s: float = 0.0
) -> Iterator[None]:
    """Ends this process if the block takes longer than the rendezvous' timeout; raises on a broken connection.

    Args:
        rendezvous: rendezvous of all ranks, which enter the block at about the same time.
        when: words that complete "did not answer ...".
        passed_flag: flag that ranks set when they leave the block; None for `when`.
        extra_s: seconds added to the timeout, where a call inside has the same timeout and a better error message.

    Raises:
        UnreachableError: another rank has ended, perhaps because it gave up a moment earlier.
    """
    limit_s, start = rendezvous.timeout_s + extra_s, time.monotonic()
    flag = passed_flag or when

    def error(reason: str = "the others wait for it") -> UnreachableError:
        missing = give_up(rendezvous, flag, rendezvous.ranks)
        return unreachable(rendezvous, missing, when, reason, seconds=time.monotonic() - start)

    with exit_after(limit_s, error):
        try:
            yield
        except RuntimeError as broken:
            raise error(str(broken).splitlines()[0]) from None
        rendezvous.mark(flag)


@contextmanager
def exit_after(seconds: float, error: Callable[[], HeadraceError]) -> Iterator[None]:
    """Ends this process with an error if the block takes more than `seconds`."""

    def fail() -> None:
        raise error()

    timer = threading.Timer(seconds, lambda: leave(guarded(fail)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # once the timer has begun to end this process, do nothing else


def give_up(rendezvous: Rendezvous, passed_flag: str, ranks: Iterable[int]) -> list[int]:
    """Sets this rank's give-up flag; returns `missing_ranks` once all waiting ranks have given up, too."""
    candidates = list(ranks)
    if not rendezvous.mark("gave-up"):
        return [0]
    until, pause_s = time.monotonic() + SETTLE_S, max(0.1, rendezvous.world_size / _ASKED_PER_SECOND)
    while (missing := missing_ranks(rendezvous, passed_flag, candidates)) and time.monotonic() < until:
        time.sleep(pause_s)
    return missing


def missing_ranks(rendezvous: Rendezvous, passed_flag: str, ranks: Iterable[int]) -> list[int]:
    """Returns the ranks that have neither set the flag `passed_flag` nor given up so far."""
    not_passed = rendezvous.ranks_without(passed_flag, ranks)
    return rendezvous.ranks_without("gave-up", not_passed) if not_passed else []


def unreachable(
    rendezvous: Rendezvous, missing: list[int], when: str, reason: str, *, seconds: float
) -> UnreachableError:
    """Makes the error that names the missing ranks; kills missing ranks that are stopped on this host.

    Args:
        rendezvous: rendezvous of all ranks.
        missing: missing ranks, from `give_up`; if empty, the network is at fault.
        when: words that complete "did not answer ...".
        reason: why this rank gave up.
        seconds: seconds that this rank has waited.
    """
    if missing:
        text = f"{rendezvous.describe(missing)} did not answer {when} within {seconds:.1f} s\n  why: {reason}\n"
        text += "  try: check that host and the rank's own error; start without it, or raise launch.timeout"
    else:
        text = f"all ranks have joined, but did not reach each other {when}: {reason}\n"
        text += "  try: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface that the hosts share"
    if rendezvous.rank == 0:
        time.sleep(SETTLE_S + 1.0)  # the other ranks still read flags from the store in this process
    kill_stopped(missing)
    return UnreachableError(text)


def kill_stopped(ranks: Collection[int]) -> None:
    """Kills stopped ranks that this process's launcher started on this host.

    Stopped ranks cannot exit, and torchrun and deepspeed would wait 30 s for them.
    """
    jobs = set[tuple[str, str]]()
    # the initial environment counts, too: torchrun's variables, set later, hide srun's and mpirun's
    for start in (False, True):
        with suppress(OSError, ConfigError):
            own = detect(environment_of(os.getpid()) if start else os.environ, parent=os.getppid())
            jobs.add((own.launcher, own.master))
    for pid in siblings():
        with suppress(OSError, ConfigError):
            other = detect(environment_of(pid), parent=os.getppid())
            if (other.launcher, other.master) in jobs and other.rank in ranks and state_of(pid)[0] == STOPPED:
                os.kill(pid, signal.SIGKILL)
