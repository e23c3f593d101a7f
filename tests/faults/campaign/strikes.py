"""What is done to a run. A strike falls at its moment, and tells what may come of it."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from headrace.base.errors import EXIT_INTERRUPTED, EXIT_LOST, EXIT_REQUEUE, EXIT_USAGE
from tests.faults.campaign.checkpoints import named
from tests.faults.campaign.layouts import MEETING_S, SILENT_S, STEPS
from tests.faults.campaign.start import POLL_S, Start

SLACK_S = 45.0
"""For the end of all processes, on a machine that does other things too; launchers allow ranks 5 s and more."""
IMPORTS_S = 45.0
"""What the imports of a start may take on such a machine."""
START_UP_S = 180.0
"""More for a run that is asked to stop before its first step: it starts up first, if all its ranks note the signal."""
LAUNCHER_S = 45.0
"""More for torchrun and deepspeed, which wait 30 s for ranks that do not end."""
BALLAST = "ballast"
_CHUNK = 1 << 16
_TERM, _USR1, _INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


@dataclass(frozen=True)
class Blow:
    """What was done.

    Attributes:
        victim: the rank, where it was one.
        named: the watchdog has to name it: all ranks were heard of, and none had finished.
        told: somebody has to name it: whoever waits for it, or the watchdog.
        limit_s: seconds in which all processes have to be gone.
        codes: the launcher's exit codes that are in order.
        asked_at: the step after which it was asked to stop, where it trained.
        what: more words for the report of something wrong.
    """

    victim: int | None = None
    named: bool = False
    told: bool = False
    limit_s: float = SLACK_S
    codes: frozenset[int] = frozenset()
    asked_at: int | None = None
    what: str = ""


@dataclass(frozen=True)
class Kind:
    """A way to strike.

    Attributes:
        name: in the report.
        strike: does it; None when there was nobody left to be struck.
        moment: the only one it makes sense at; any where None.
        launchers: that it makes sense with; any where None.
        needs_small_disk: the run's directory has to be on a file system that can be filled.
        damages: what is done to a checkpoint after all processes are gone.
    """

    name: str
    strike: Callable[[Start, random.Random], Blow | None]
    moment: str | None = None
    launchers: tuple[str, ...] | None = None
    needs_small_disk: bool = False
    damages: str | None = None


def _dead(number: signal.Signals) -> set[int]:
    """What is left of a launcher that a signal ended, or that tells of a rank that it ended."""
    return {-number, 128 + number}


def _kill_rank(start: Start, rng: random.Random) -> Blow | None:
    return _to_rank(start, rng, signal.SIGKILL, frozenset({EXIT_LOST, *_dead(signal.SIGKILL)}))


def _stop_rank(start: Start, rng: random.Random) -> Blow | None:
    """One process alone that is stopped is a run that somebody holds: it is left alone."""
    if start.layout.processes == 1:
        return None
    blow = _to_rank(start, rng, signal.SIGSTOP, frozenset({EXIT_LOST, *_dead(signal.SIGKILL)}))
    # until then the others come, wait in the meeting, and perhaps in a check after it
    told = blow is not None and start.done() < STEPS
    return blow and replace(blow, told=told, limit_s=SLACK_S + (SILENT_S if blow.named else IMPORTS_S + 2 * MEETING_S))


def _to_rank(start: Start, rng: random.Random, how: signal.Signals, codes: frozenset[int]) -> Blow | None:
    ranks = start.ranks()
    if not ranks:
        return None
    victim = rng.choice(sorted(ranks))
    watched = 0 < start.done() < STEPS
    with suppress(psutil.NoSuchProcess):
        ranks[victim].send_signal(how)
        return Blow(victim, watched, limit_s=_patience(start, how), codes=codes, asked_at=_asked_at(start, how))
    return None


def _patience(start: Start, how: signal.Signals) -> float:
    return SLACK_S + (START_UP_S if how in (_TERM, _USR1, _INT) and start.done() == 0 else 0.0)


def _asked_at(start: Start, how: signal.Signals) -> int | None:
    return start.done() if how in (_TERM, _USR1, _INT) and 0 < start.done() < STEPS else None


def _kill_ranks(start: Start, _rng: random.Random) -> Blow | None:
    ranks = start.ranks()
    for process in ranks.values():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return Blow(codes=frozenset({EXIT_LOST, *_dead(signal.SIGKILL)})) if ranks else None


def _kill_launcher(start: Start, _rng: random.Random) -> Blow | None:
    return _to_launcher(start, signal.SIGKILL, frozenset())


def _kill_machine(start: Start, _rng: random.Random) -> Blow | None:
    """All at once, the launcher and the watchdog too, as when the power fails."""
    if not start.alive:
        return None
    start.kill()
    return Blow(codes=frozenset(_dead(signal.SIGKILL)))


def _ask_launcher(how: signal.Signals, code: int) -> Callable[[Start, random.Random], Blow | None]:
    """A run that is asked to stop before it can note it dies of the signal, like any process."""
    return lambda start, _rng: _to_launcher(start, how, frozenset({code, *_dead(how)}))


def _ask_rank(start: Start, rng: random.Random) -> Blow | None:
    return _to_rank(start, rng, signal.SIGTERM, frozenset({EXIT_REQUEUE, EXIT_LOST, *_dead(signal.SIGTERM)}))


def _to_launcher(start: Start, how: signal.Signals, codes: frozenset[int]) -> Blow | None:
    if not start.alive:
        return None
    limit_s = _patience(start, how)
    start.process.send_signal(how)
    return Blow(codes=codes | {-how}, limit_s=limit_s, asked_at=_asked_at(start, how))


def fill(small: Path) -> None:
    """Leaves no byte free."""
    with (small / BALLAST).open("ab", buffering=0) as file:
        for size in (_CHUNK, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def is_full(small: Path) -> bool:
    """Whether not a byte can be written."""
    probe = small / ".probe"
    try:
        probe.write_bytes(b"1")
    except OSError as error:
        return error.errno == errno.ENOSPC
    finally:
        with suppress(OSError):
            probe.unlink()
    return False


def free(small: Path) -> None:
    """Room again."""
    (small / BALLAST).unlink(missing_ok=True)


def _fill_and_free(start: Start, rng: random.Random) -> Blow | None:
    """The disk is full for seconds; the run has to live through it, and save itself again afterwards."""
    if not start.alive:
        return None
    small = start.run_dir.parent
    newest = max(named(start.run_dir), default=0)
    fill(small)
    _pass(start, rng.uniform(1.0, 3.0))
    filled, over = start.done(), not start.alive or f"step {STEPS}/{STEPS}" in start.said
    free(small)
    later = start.wait_for(lambda: max(named(start.run_dir), default=0) > max(newest, filled), within_s=60.0)
    if start.alive and not (later or over):
        start.kill()
        return Blow(what="no checkpoint was written in the 60 s after there was room again")
    if start.alive and not over:
        start.kill()
        return Blow(codes=frozenset(_dead(signal.SIGKILL)))
    return Blow(codes=frozenset({0, EXIT_USAGE} if over else {0}))


def _fill_and_ask(start: Start, rng: random.Random) -> Blow | None:
    """Asked to stop, it cannot save itself."""
    if not start.alive:
        return None
    fill(start.run_dir.parent)
    _pass(start, rng.uniform(0.0, 2.0))
    if start.alive:
        start.process.send_signal(signal.SIGTERM)
    return Blow(codes=frozenset({EXIT_USAGE, EXIT_REQUEUE, *_dead(signal.SIGTERM)}))


def _fill_and_kill(start: Start, rng: random.Random) -> Blow | None:
    if not start.alive:
        return None
    fill(start.run_dir.parent)
    _pass(start, rng.uniform(0.0, 3.0))
    return _kill_machine(start, rng) or Blow(codes=frozenset({0, EXIT_USAGE}))


def _pass(start: Start, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while start.alive and time.monotonic() < deadline:
        time.sleep(POLL_S)


def can_mount() -> bool:
    """Whether this process may make small file systems."""
    return os.geteuid() == 0 and Path("/proc/mounts").exists()


_OURS = ("warm", "nproc", "plain")
# the ranks of torchrun and deepspeed outlive their launcher, and go on to the end of the run; deepspeed does not hand
# SIGTERM on
_HANDS_ON = (*_OURS, "torchrun")
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("SIGKILL, one rank", _kill_rank),
        Kind("SIGKILL, all ranks", _kill_ranks),
        Kind("SIGKILL, the launcher", _kill_launcher, launchers=_OURS),
        Kind("SIGKILL, everything", _kill_machine),
        Kind("SIGKILL, everything, in a write", _kill_machine, moment="writing"),
        Kind("SIGKILL, one rank, in a write", _kill_rank, moment="writing"),
        Kind("SIGSTOP, one rank", _stop_rank),
        Kind("SIGTERM, the launcher", _ask_launcher(_TERM, EXIT_REQUEUE), launchers=_HANDS_ON),
        Kind("SIGTERM, one rank", _ask_rank),
        Kind("SIGUSR1, the launcher", _ask_launcher(_USR1, EXIT_REQUEUE), launchers=_OURS),
        Kind("SIGINT, the launcher", _ask_launcher(_INT, EXIT_INTERRUPTED)),
        Kind("disk full for a while", _fill_and_free, moment="training", needs_small_disk=True),
        Kind("disk full, SIGTERM", _fill_and_ask, moment="training", launchers=_HANDS_ON, needs_small_disk=True),
        Kind("disk full, SIGKILL", _fill_and_kill, moment="training", needs_small_disk=True),
        Kind("a bit flipped in a checkpoint", _kill_machine, moment="with two checkpoints", damages="flip"),
        Kind("a checkpoint's file cut off", _kill_machine, moment="with two checkpoints", damages="truncate"),
        Kind("a checkpoint's file deleted", _kill_machine, moment="with two checkpoints", damages="delete"),
    )
}
