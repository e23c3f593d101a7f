"""Ends this process from a thread while the main thread is blocked, and kills stopped or hung ranks (SIGKILL)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from foundation.processes import machine, state_of
from pipeline.runtime.faults.diagnosis import Diagnosis, RankStatus

Process = tuple[str, int, int]
"""Identity of a process: machine, pid, and start time in kernel clock ticks."""


def ranks_to_kill(diagnosis: Diagnosis, statuses: Mapping[int, RankStatus]) -> list[Process]:
    """Returns the ranks at fault that cannot exit on their own: they are stopped, or never get the interpreter lock."""
    at_fault = [statuses[rank] for rank in diagnosis.ranks if diagnosis.kind in ("silent", "stuck")]
    return [(s.machine, s.pid, s.start_ticks) for s in at_fault if diagnosis.kind == "silent" or s.gil_held]


def kill_ranks(processes: Iterable[Sequence[object]]) -> None:
    """Kills the ranks that run on this machine. A reused pid is left alone."""
    for where, pid, start_ticks in processes:
        if where != machine() or not isinstance(pid, int) or pid == os.getpid() or not start_ticks:
            continue
        if state_of(pid)[1] == start_ticks:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def exit_now(code: int) -> NoReturn:
    """Exits from any thread. Output is flushed, unless the main thread holds the stream's lock."""
    thread = threading.Thread(target=_flush, daemon=True)
    thread.start()
    thread.join(1.0)
    os._exit(code)


def _flush() -> None:
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        sys.stderr.write("\x1b[?25h")  # show the cursor, which the progress bar has hidden
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
