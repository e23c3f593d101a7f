"""Starts ranks and commands of tests quickly, by forking a process that has imported their modules.

Imports take a rank 5 CPU seconds and torchrun 3 more, and a data-prep job 2 with those of its workers; the tests start
hundreds of ranks and jobs. A forked process has its own environment, arguments, output and exit code, and runs its
script from the first line (`tests.warm_python`). Tests of starting, signals, kills, resource limits and imports start
real processes; launchers themselves are tested in `launch/test_launchers.py`, `run/test_kill_resume.py`,
`test_slurm.py`.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from tests import warm_python
from tests.warm_python import Imported

ROOT = warm_python.ROOT
EXIT_S, TERMINATE_S = 10.0, 5.0
"""Seconds that the other ranks have to exit after one has failed, by themselves and after SIGTERM: rank 0 may be about
to print the whole message."""


def run(
    *command: object,
    cwd: Path = ROOT,
    processes: int = 1,
    merged: bool = False,
    timeout_s: float = 300.0,
    imported: Imported = "training",
) -> subprocess.CompletedProcess[str]:
    """Runs `SCRIPT ARGUMENTS`, `-m MODULE ARGUMENTS` or `-c CODE ARGUMENTS` as python would, on `processes` ranks.

    Args:
        command: the arguments of `python`.
        cwd: working directory.
        processes: number of ranks; several ranks get a launcher's variables.
        merged: all output of all ranks is stdout; otherwise stdout is rank 0's, and all other output is stderr.
        timeout_s: seconds until all are killed.
        imported: the modules that are imported before the fork. All data-prep jobs share one fork server of workers:
            what a worker writes to stderr itself is not in the result.

    Raises:
        TimeoutExpired: they were killed.
    """
    words = [warm_python.python(imported), *(str(word) for word in command)]
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stdout" if merged else "stderr")
        with stdout.open("a") as first, stderr.open("a") as other:
            ranks = [
                subprocess.Popen(
                    words,
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=other if rank else first,
                    stderr=other,
                )
                for rank, env in enumerate(_environments(processes))
            ]
            code = _wait(ranks, time.monotonic() + timeout_s)
        texts = stdout.read_text(errors="replace"), "" if merged else stderr.read_text(errors="replace")
    if code is None:
        raise subprocess.TimeoutExpired(words, timeout_s, output="\n".join(texts))
    return subprocess.CompletedProcess(words, code, *texts)


def _environments(processes: int) -> list[dict[str, str]]:
    """The environment of every rank."""
    if processes == 1:
        return [dict(os.environ)]
    from pipeline.runtime.launch.group import free_port  # noqa: PLC0415

    shared = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": free_port()}
    each = [{"RANK": rank, "LOCAL_RANK": rank, **shared} for rank in range(processes)]
    return [{**os.environ, **{name: str(value) for name, value in variables.items()}} for variables in each]


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """The exit code of the rank that failed first, or 0; None after a timeout."""
    running = list(ranks)
    while running:
        for rank in list(running):
            if rank.poll() is not None:
                running.remove(rank)
                if rank.returncode:
                    _end(running)
                    return rank.returncode
        if time.monotonic() > deadline:
            _end(running)
            return None
        time.sleep(0.01)
    return 0


def _end(running: list[subprocess.Popen[bytes]]) -> None:
    """Ends ranks: waits for them, then SIGTERM, then SIGKILL."""
    for end, timeout_s in ((None, EXIT_S), ("terminate", TERMINATE_S), ("kill", 60.0)):
        deadline = time.monotonic() + timeout_s
        for rank in running:
            if end is not None and rank.poll() is None:
                getattr(rank, end)()
        while any(rank.poll() is None for rank in running) and time.monotonic() < deadline:
            time.sleep(0.01)
