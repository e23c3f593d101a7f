"""Diagnosis of a failed run from the heartbeats: which ranks died, hang or failed. No clock, no sockets, no files.

All ranks run the same program, so they pass through the same (step, phase) transitions in the same order. A rank's
number of transitions tells whether it is ahead of the others or behind them.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Literal

DEPTH = 10
"""Number of innermost calls that are shown in full; further out only calls of this package are shown. The stack of a
training step is 20 to 60 calls deep."""
_OWN_PACKAGE = "/pipeline/"
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)\b")
_CALL = re.compile(r'\s+File "(.*)", line (\d+) in (.*)')
_DEBUGGERS = ("bdb.py:", "pdb.py:", "debugpy/", "pydevd")
_WAITING = ("torch/distributed/", "deepspeed/comm/", "torch/cuda/streams.py:", "threading.py:", "selectors.py:")
_WRAPPERS = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py", "transformers/utils/", "<string>", "<frozen")
"""Calls between any two layers of a model, which carry no information."""
_LIBRARIES = re.compile(r".*/(?:site-packages|dist-packages|lib/python3\.\d+)/")
SETTLE_S = 2.0
"""Seconds to wait for the root cause, after an error that looks like the consequence of another rank's failure."""
Kind = Literal["died", "silent", "stuck", "failed", "lost"]


def thread_stack(thread: int) -> tuple[str, ...]:
    """Returns the innermost calls of a thread of this process, as "file:line in function"; empty if it has ended."""
    frame: FrameType | None = sys._current_frames().get(thread)
    lines: list[str] = []
    while frame is not None:
        code = frame.f_code
        lines += _call_lines(len(lines), code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return tuple(lines)


def parse_faulthandler_dump(dump: Iterable[str], *, thread: int) -> tuple[str, ...]:
    """Extracts a thread's innermost calls from the output of `faulthandler`, which needs no interpreter lock."""
    inside, lines = False, list[str]()
    for line in dump:
        if found := _THREAD.match(line):
            inside = int(found[1], 16) == thread
        elif inside and (call := _CALL.match(line)):
            lines += _call_lines(len(lines), call[1], int(call[2]), call[3])
    return tuple(lines)


def is_waiting(stack: Sequence[str]) -> bool:
    """Tells whether the innermost calls wait for other ranks, as far as Python can tell."""
    return any(mark in line for line in stack[:4] for mark in _WAITING)


def in_debugger(stack: Iterable[str]) -> bool:
    """Tells whether the thread is stopped in a Python debugger."""
    return any(mark in line for line in stack for mark in _DEBUGGERS)


def _call_lines(depth: int, path: str, number: int, function: str) -> list[str]:
    """Formats a call as one line; returns no line for a call that is not shown."""
    in_library = _LIBRARIES.sub("", path)
    short = in_library if in_library != path else "/".join(path.rsplit("/", 3)[-3:])
    wanted = _OWN_PACKAGE in path if depth >= DEPTH else not short.startswith(_WRAPPERS)
    return [f"{short}:{number} in {function}"] if wanted else []


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank, as the heartbeat server knows it.

    Attributes:
        rank: global rank.
        host: host name.
        pid: process id.
        machine: identity of the kernel and the process's pid namespace; a `pid` identifies a process only within one
            `machine`.
        start_ticks: start time of the process in kernel clock ticks; distinguishes it from a later process with the
            same pid.
        main_thread: identity of its main thread.
        last_heartbeat: time of the last heartbeat, in seconds of the server's clock.
        last_progress: time of the last heartbeat that reported progress.
        transitions: number of (step, phase) transitions so far.
        ticks: progress reports within the current phase.
        step: the current step, or the last one.
        phase: current phase: start-up, training, ...
        stack: call stack of its main thread, innermost call first.
        collective: the oldest collective that it has begun and not ended, while it makes no progress; empty otherwise.
        gil_held: whether the last heartbeat was a `faulthandler` dump: some call holds the interpreter lock (GIL).
        finished: whether it has signed off.
        disconnected: whether its connection is closed.
        error: first line of its own error.
        secondary: whether its error looks like a consequence of another rank's failure.
        error_time: time when the error was reported, in seconds of the server's clock.
    """

    rank: int
    host: str
    pid: int
    last_heartbeat: float
    last_progress: float
    machine: str = ""
    start_ticks: int = 0
    main_thread: int = 0
    transitions: int = 0
    ticks: int = 0
    step: int = 0
    phase: str = "start-up"
    stack: tuple[str, ...] = ()
    collective: str = ""
    gil_held: bool = False
    finished: bool = False
    disconnected: bool = False
    error: str | None = None
    secondary: bool = False
    error_time: float = 0.0

    @property
    def monitored(self) -> bool:
        """Whether the watchdog expects heartbeats from this rank."""
        return not self.finished and not self.disconnected


@dataclass(frozen=True)
class Diagnosis:
    """The cause of the end of a run.

    Attributes:
        kind: died (its connection closed without signing off), silent (no heartbeats), stuck (hang), failed (with an
            error of its own), or lost (a broken link to another rank, while no rank has died, failed or gone silent).
        ranks: the ranks at fault, in ascending order.
        seconds: seconds since their last heartbeat; for "stuck", since the last progress of any rank.
    """

    kind: Kind
    ranks: tuple[int, ...]
    seconds: float


def diagnose(
    statuses: Sequence[RankStatus], now: float, *, silent_s: float, stuck_s: float, interval_s: float = 1.0
) -> Diagnosis | None:
    """Diagnoses the run from the status of all ranks; None while there is no fault.

    Args:
        statuses: statuses of the ranks that have registered.
        now: current time, in seconds of the server's clock.
        silent_s: heartbeat timeout: seconds without a heartbeat after which a rank counts as stopped.
        stuck_s: hang timeout: seconds without progress of any rank after which the run counts as stuck.
        interval_s: seconds between heartbeats.
    """
    monitored = [status for status in statuses if status.monitored]
    failed = sorted((s for s in statuses if s.error is not None), key=lambda s: s.error_time)
    causes = [s for s in failed if not s.secondary]
    dead = [s for s in statuses if s.disconnected and not s.finished and s.error is None]
    unlinked = [s for s in failed if s.disconnected or now - s.error_time > SETTLE_S]
    # nccl ends ranks half a minute after another rank's host has lost power: the rank whose heartbeat is overdue by
    # then is the cause. A call that holds the interpreter lock delays heartbeats by up to half the timeout
    limit_s = silent_s / 2 + 2 * interval_s
    overdue = [s for s in monitored if now - s.last_heartbeat > limit_s] if dead or unlinked else []
    return (
        _diagnosis("failed", causes[:1], now)
        or _diagnosis("silent", overdue, now)
        or _diagnosis("died", dead, now)
        or _diagnosis("lost", unlinked, now)
        or _diagnosis("silent", [s for s in monitored if now - s.last_heartbeat > silent_s], now)
        or _hang(monitored, now, stuck_s)
    )


def _diagnosis(kind: Kind, at_fault: Sequence[RankStatus], now: float) -> Diagnosis | None:
    if not at_fault:
        return None
    ranks = tuple(sorted(status.rank for status in at_fault))
    return Diagnosis(kind, ranks, now - min(status.last_heartbeat for status in at_fault))


def _hang(monitored: Sequence[RankStatus], now: float, stuck_s: float) -> Diagnosis | None:
    if not monitored or any(in_debugger(status.stack) for status in monitored):
        return None
    idle_s = now - max(status.last_progress for status in monitored)
    if idle_s <= stuck_s:
        return None
    return Diagnosis("stuck", tuple(sorted(status.rank for status in _ranks_behind(monitored))), idle_s)


def _ranks_behind(monitored: Sequence[RankStatus]) -> Sequence[RankStatus]:
    """Returns ranks with the fewest transitions; if all are equal, ranks that do not wait; else a minority by stack.

    A rank waits for others when its stack shows it, or when a collective that it has begun has not ended: it may wait
    inside our own code for a value computed on a GPU.
    """
    fewest = min(status.transitions for status in monitored)
    behind = [status for status in monitored if status.transitions == fewest]
    if len(behind) < len(monitored):
        return behind
    behind = [status for status in monitored if not (status.collective or is_waiting(status.stack))] or behind
    if len(behind) < len(monitored):
        return behind
    by_call = Counter(status.stack[:1] for status in behind)
    rarest, count = min(by_call.items(), key=lambda item: item[1])
    return [status for status in behind if status.stack[:1] == rarest] if count * 2 < len(behind) else behind
