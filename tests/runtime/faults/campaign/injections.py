"""The faults that are injected into a run, and the outcomes that each of them allows."""

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

from foundation.errors import EXIT_INTERRUPTED, EXIT_LOST, EXIT_REQUEUE, EXIT_USAGE
from tests.runtime.faults.campaign.checkpoints import finished
from tests.runtime.faults.campaign.layouts import RENDEZVOUS_S, SILENT_S, STEPS
from tests.runtime.faults.campaign.start import POLL_S, Start

SLACK_S = 45.0
"""Time for all processes to exit on a busy machine; launchers give ranks 5 s and more."""
IMPORTS_S = 45.0
"""Time for the imports of a start on such a machine."""
START_UP_S = 180.0
"""Extra time for a run that is stopped before its first step: it starts up first, if all its ranks get the signal."""
LAUNCHER_S = 45.0
"""Extra time for torchrun and deepspeed, which wait 30 s for ranks that do not exit."""
BALLAST = "ballast"
_CHUNK = 1 << 16
_TERM, _USR1, _INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


@dataclass(frozen=True)
class Injection:
    """An injected fault, and what is expected of the run.

    Attributes:
        victim: the rank, where it was a single one.
        watchdog_names_it: the watchdog must name the victim: all ranks were registered, and none had finished.
        must_be_named: the watchdog or the ranks that wait for the victim must name it.
        limit_s: seconds in which all processes must exit.
        codes: allowed exit codes of the launcher.
        stop_step: the step after which a stop signal was sent, during training.
        what: a failure seen during the injection itself.
    """

    victim: int | None = None
    watchdog_names_it: bool = False
    must_be_named: bool = False
    limit_s: float = SLACK_S
    codes: frozenset[int] = frozenset()
    stop_step: int | None = None
    what: str = ""


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        name: in the report.
        inject: injects it; returns None when the processes had exited before.
        moment: the only moment it applies to; any where None.
        launchers: launchers under which the fault is tried; all if None.
        needs_small_disk: the run's directory must be on a file system that can be filled.
        damages: how a checkpoint is damaged after all processes have exited.
    """

    name: str
    inject: Callable[[Start, random.Random], Injection | None]
    moment: str | None = None
    launchers: tuple[str, ...] | None = None
    needs_small_disk: bool = False
    damages: str | None = None


def _killed_codes(number: signal.Signals) -> set[int]:
    """Exit codes of a launcher that was ended by a signal, or that reports a rank that was."""
    return {-number, 128 + number}


def _kill_rank(start: Start, rng: random.Random) -> Injection | None:
    return _to_rank(start, rng, signal.SIGKILL, frozenset({EXIT_LOST, *_killed_codes(signal.SIGKILL)}))


def _stop_rank(start: Start, rng: random.Random) -> Injection | None:
    """A single process that is stopped is a paused run, which is no fault."""
    if start.layout.processes == 1:
        return None
    injection = _to_rank(start, rng, signal.SIGSTOP, frozenset({EXIT_LOST, *_killed_codes(signal.SIGKILL)}))
    if injection is None:
        return None
    # before the watchdog runs the others start, wait in the rendezvous, and perhaps in a check after it
    limit_s = SLACK_S + (SILENT_S if injection.watchdog_names_it else IMPORTS_S + 2 * RENDEZVOUS_S)
    return replace(injection, must_be_named=start.done() < STEPS, limit_s=limit_s)


def _to_rank(start: Start, rng: random.Random, number: signal.Signals, codes: frozenset[int]) -> Injection | None:
    ranks = start.ranks()
    if not ranks:
        return None
    victim = rng.choice(sorted(ranks))
    training = 0 < start.done() < STEPS
    with suppress(psutil.NoSuchProcess):
        ranks[victim].send_signal(number)
        return Injection(
            victim, training, limit_s=_limit_s(start, number), codes=codes, stop_step=_stop_step(start, number)
        )
    return None


def _limit_s(start: Start, number: signal.Signals) -> float:
    return SLACK_S + (START_UP_S if number in (_TERM, _USR1, _INT) and start.done() == 0 else 0.0)


def _stop_step(start: Start, number: signal.Signals) -> int | None:
    return start.done() if number in (_TERM, _USR1, _INT) and 0 < start.done() < STEPS else None


def _kill_ranks(start: Start, _rng: random.Random) -> Injection | None:
    ranks = start.ranks()
    for process in ranks.values():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return Injection(codes=frozenset({EXIT_LOST, *_killed_codes(signal.SIGKILL)})) if ranks else None


def _kill_launcher(start: Start, _rng: random.Random) -> Injection | None:
    return _to_launcher(start, signal.SIGKILL, frozenset())


def _kill_machine(start: Start, _rng: random.Random) -> Injection | None:
    """All processes at once, also the launcher and the heartbeat server, as in a power failure."""
    if not start.alive:
        return None
    start.kill()
    return Injection(codes=frozenset(_killed_codes(signal.SIGKILL)))


def _stop_launcher(number: signal.Signals, code: int) -> Callable[[Start, random.Random], Injection | None]:
    """Before the handlers are installed a run dies of a stop signal, like any process."""
    return lambda start, _rng: _to_launcher(start, number, frozenset({code, *_killed_codes(number)}))


def _terminate_rank(start: Start, rng: random.Random) -> Injection | None:
    return _to_rank(start, rng, signal.SIGTERM, frozenset({EXIT_REQUEUE, EXIT_LOST, *_killed_codes(signal.SIGTERM)}))


def _to_launcher(start: Start, number: signal.Signals, codes: frozenset[int]) -> Injection | None:
    if not start.alive:
        return None
    limit_s = _limit_s(start, number)
    start.process.send_signal(number)
    return Injection(codes=codes | {-number}, limit_s=limit_s, stop_step=_stop_step(start, number))


def fill(small: Path) -> None:
    with (small / BALLAST).open("ab", buffering=0) as file:
        for size in (_CHUNK, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def is_full(small: Path) -> bool:
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
    (small / BALLAST).unlink(missing_ok=True)


def _fill_and_free(start: Start, rng: random.Random) -> Injection | None:
    """The disk is full for some seconds; the run must survive, and save checkpoints again afterwards."""
    if not start.alive:
        return None
    small = start.run_dir.parent
    newest = max(finished(start.run_dir), default=0)
    fill(small)
    _sleep(start, rng.uniform(1.0, 3.0))
    filled, ended = start.done(), not start.alive or f"step {STEPS}/{STEPS}" in start.output
    free(small)
    later = start.wait_for(lambda: max(finished(start.run_dir), default=0) > max(newest, filled), within_s=60.0)
    if start.alive and not (later or ended):
        start.kill()
        return Injection(what="no checkpoint was written within 60 s after space was freed")
    if start.alive and not ended:
        start.kill()
        return Injection(codes=frozenset(_killed_codes(signal.SIGKILL)))
    return Injection(codes=frozenset({0, EXIT_USAGE} if ended else {0}))


def _fill_and_stop(start: Start, rng: random.Random) -> Injection | None:
    """After a stop signal, it cannot save a checkpoint."""
    if not start.alive:
        return None
    fill(start.run_dir.parent)
    _sleep(start, rng.uniform(0.0, 2.0))
    if start.alive:
        start.process.send_signal(signal.SIGTERM)
    return Injection(codes=frozenset({EXIT_USAGE, EXIT_REQUEUE, *_killed_codes(signal.SIGTERM)}))


def _fill_and_kill(start: Start, rng: random.Random) -> Injection | None:
    if not start.alive:
        return None
    fill(start.run_dir.parent)
    _sleep(start, rng.uniform(0.0, 3.0))
    return _kill_machine(start, rng) or Injection(codes=frozenset({0, EXIT_USAGE}))


def _sleep(start: Start, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while start.alive and time.monotonic() < deadline:
        time.sleep(POLL_S)


def can_mount() -> bool:
    return os.geteuid() == 0 and Path("/proc/mounts").exists()


_OWN_LAUNCHERS = ("warm", "nproc", "plain")
# the ranks of torchrun and deepspeed outlive their launcher, and finish the run; deepspeed does not forward SIGTERM
_FORWARDS_SIGTERM = (*_OWN_LAUNCHERS, "torchrun")
FAULTS: Mapping[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind("SIGKILL, one rank", _kill_rank),
        FaultKind("SIGKILL, all ranks", _kill_ranks),
        FaultKind("SIGKILL, the launcher", _kill_launcher, launchers=_OWN_LAUNCHERS),
        FaultKind("SIGKILL, everything", _kill_machine),
        FaultKind("SIGKILL, everything, in a write", _kill_machine, moment="writing"),
        FaultKind("SIGKILL, one rank, in a write", _kill_rank, moment="writing"),
        FaultKind("SIGSTOP, one rank", _stop_rank),
        FaultKind("SIGTERM, the launcher", _stop_launcher(_TERM, EXIT_REQUEUE), launchers=_FORWARDS_SIGTERM),
        FaultKind("SIGTERM, one rank", _terminate_rank),
        FaultKind("SIGUSR1, the launcher", _stop_launcher(_USR1, EXIT_REQUEUE), launchers=_OWN_LAUNCHERS),
        FaultKind("SIGINT, the launcher", _stop_launcher(_INT, EXIT_INTERRUPTED)),
        FaultKind("disk full for a while", _fill_and_free, moment="training", needs_small_disk=True),
        FaultKind(
            "disk full, SIGTERM", _fill_and_stop, moment="training", launchers=_FORWARDS_SIGTERM, needs_small_disk=True
        ),
        FaultKind("disk full, SIGKILL", _fill_and_kill, moment="training", needs_small_disk=True),
        FaultKind("a bit flipped in a checkpoint", _kill_machine, moment="with two checkpoints", damages="flip"),
        FaultKind("a checkpoint's file cut off", _kill_machine, moment="with two checkpoints", damages="truncate"),
        FaultKind("a checkpoint's file deleted", _kill_machine, moment="with two checkpoints", damages="delete"),
    )
}
