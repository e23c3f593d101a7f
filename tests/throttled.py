"""Runs a script of which one rank works at a fraction of its speed, as a device that is throttled or older.

    python tests/throttled.py RANK SLOWDOWN SCRIPT [ARGUMENT ...]

A helper process suspends the rank (SIGSTOP, SIGCONT): for every second of work `SLOWDOWN` - 1 seconds. Work is time on
a core or in its run queue (/proc/PID/task/*/schedstat), so that the rank is slower than its peers by that factor on a
busy machine, too, where a process that is suspended at fixed times is given the core all the more in between.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.002
_LONGEST_S = 0.1
"""Suspensions are no longer: work that the helper has seen late is made up for in several."""


def work_seconds(pid: int) -> float:
    """Seconds that the threads of a process were running or in the run queue."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            running, waiting, _ = path.read_text().split()
        except (OSError, ValueError):  # the thread has ended
            continue
        total += int(running) + int(waiting)
    return total / 1e9


def throttle(pid: int, slowdown: float) -> None:
    seen, due = work_seconds(pid), 0.0
    while Path(f"/proc/{pid}").exists():
        now = work_seconds(pid)
        due, seen = due + max(0.0, now - seen) * (slowdown - 1), max(seen, now)
        if due < _POLL_S:
            time.sleep(_POLL_S)
            continue
        started = time.perf_counter()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(min(due, _LONGEST_S))
        os.kill(pid, signal.SIGCONT)
        due -= time.perf_counter() - started


def main() -> None:
    """Throttles the process whose id is given, or runs the script."""
    if sys.argv[1] == "--pid":
        with suppress(ProcessLookupError):
            throttle(int(sys.argv[2]), float(sys.argv[3]))
        return
    rank, slowdown, *words = sys.argv[1:]
    if os.environ.get("RANK") == rank:
        helper = [sys.executable, __file__, "--pid", str(os.getpid()), slowdown]
        subprocess.Popen(helper, start_new_session=True)
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
