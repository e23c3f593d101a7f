"""Processes on Linux: their state, start and environment, signals to child processes, and ending with the parent."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType

STOPPED = "T"
"""State of a process that SIGSTOP, SIGTSTP or a batch system has stopped."""
TRACED = "t"
"""State of a process that a debugger has stopped."""


@cache
def machine() -> str:
    """Names the kernel's boot and the pid namespace: where two processes agree, a pid means one process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()


def state_of(pid: int) -> tuple[str, int]:
    """A process's state (R, S, D, T, Z, ...) and its start, in the kernel's ticks; ("", 0) if it does not exist."""
    fields = _stat(pid)
    return (fields[0], int(fields[19])) if fields else ("", 0)


def seconds_since_start() -> float:
    """Seconds since this process began, by the kernel's ticks (10 ms); 0 if unknown."""
    _, ticks = state_of(os.getpid())
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")) if ticks else 0.0


def raise_file_limit() -> int:
    """Raises this process's limit of open files to its hard limit (`ulimit -Hn`), and returns it.

    The usual soft limit of 1,024 is too low for a process to which a thousand others connect.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def siblings() -> Iterator[int]:
    """Ids of the processes that this one's parent has started."""
    parent = str(os.getppid())
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(folder.name))
        if fields and fields[1] == parent:
            yield int(folder.name)


def environment_of(pid: int) -> dict[str, str]:
    """Returns the environment variables with which a process was started.

    Raises:
        OSError: the process belongs to another user, or has ended.
    """
    text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    return dict(each.split("=", 1) for each in text.split("\0") if "=" in each)


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent process ends for any reason."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def adopt_orphans() -> None:
    """Asks Linux to make this process the parent of its descendants whose parent ends; `end_descendants` finds them."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def end_descendants(*, timeout_s: float = 5.0) -> list[int]:
    """Kills all descendants of this process, in whatever session; no `subprocess.Popen` of it can be waited for then.

    Returns:
        Ids of processes that did not end within `timeout_s` seconds: a driver or a file system blocks them.
    """
    deadline = time.monotonic() + timeout_s
    while found := _descendants():
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return found
        time.sleep(0.01)
    return []


@contextmanager
def signals_passed_on(processes: Collection[subprocess.Popen[bytes]]) -> Iterator[Callable[[], bool]]:
    """Passes SIGTERM on to child processes, and waits for them after Ctrl-C, which the terminal sends to all.

    Args:
        processes: child processes; the collection may change during the block.

    Yields:
        A function that returns whether there was such a signal.
    """
    stopped = False

    def hand_on(number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        for process in list(processes):
            process.send_signal(number)

    def wait(_number: int, _frame: FrameType | None) -> None:
        """Waits: the children end on their own, with a checkpoint if they train."""
        nonlocal stopped
        stopped = True

    before = {number: signal.signal(number, on) for number, on in ((signal.SIGTERM, hand_on), (signal.SIGINT, wait))}
    try:
        yield lambda: stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _descendants() -> list[int]:
    """Ids of the children of this process, of their children, and so on."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(folder.name)):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _stat(pid: int) -> list[str]:
    """The fields of `proc_pid_stat(5)` from the third on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
