"""Ending processes: this one, from a thread beside a main thread that waits for ever; and others that are stopped."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from headrace.base.processes import machine, state_of
from pipeline.faults.diagnosis import Diagnosis, RankStatus

Process = tuple[str, int, int]
"""Machine, pid, and when it began."""


def ranks_to_kill(verdict: Diagnosis, records: Mapping[int, RankStatus]) -> list[Process]:
    """Those to blame that cannot end themselves: they are stopped, or never get the interpreter's lock."""
    guilty = [records[rank] for rank in verdict.ranks if verdict.kind in ("silent", "stuck")]
    return [(r.machine, r.pid, r.born) for r in guilty if verdict.kind == "silent" or r.starved]


def kill_ranks(doomed: Iterable[Sequence[object]]) -> None:
    """Kills those of the processes that run on this machine. A pid that was given out again is left alone."""
    for where, pid, born in doomed:
        if where == machine() and isinstance(pid, int) and born and state_of(pid)[1] == born and pid != os.getpid():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def leave_now(code: int) -> NoReturn:
    """Ends this process from any thread. What was printed is flushed, unless the main thread holds the stream."""
    thread = threading.Thread(target=_flush, daemon=True)
    thread.start()
    thread.join(1.0)
    os._exit(code)


def _flush() -> None:
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        sys.stderr.write("\x1b[?25h")  # the progress bar has hidden the cursor
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
