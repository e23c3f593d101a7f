"""A consumer's process: its progress, its log, and its end when it hangs. No torch."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

SILENCE_S = 3600.0
"""Seconds without output after which a process counts as hung; loading a model or scoring a batch takes less."""


def run_worker(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, progress: Callable[[int, int], None]
) -> int:
    """Runs a process that prints "progress DONE ALL" lines; returns its exit code, -9 if it was silent for too long.

    Args:
        command: command line of the process.
        environment: environment variables of the process.
        log: file to which its errors and its other lines are appended.
        progress: called with (done, all).
    """
    with (
        log.open("a") as written,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=written, text=True, env=dict(environment)) as process,
    ):
        assert process.stdout is not None
        with _killed_when_silent(process, log) as heard:
            for line in process.stdout:
                heard()
                word, *numbers = line.split()[:3] or [""]
                if word == "progress":
                    progress(int(numbers[0]), int(numbers[1]))
                else:
                    written.write(line)
                    written.flush()
            return process.wait()


@contextmanager
def _killed_when_silent(process: subprocess.Popen[str], log: Path) -> Iterator[Callable[[], None]]:
    """Kills a silent process; yields the function to call for every line that the process prints."""
    over, said = threading.Event(), time.monotonic()

    def heard() -> None:
        nonlocal said
        said = time.monotonic()

    def watch() -> None:
        while not over.wait(min(1.0, SILENCE_S)):
            if time.monotonic() - said > SILENCE_S:
                with log.open("a") as file:
                    file.write(f"it was killed after {SILENCE_S:g} s without progress\n")
                process.kill()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield heard
    finally:
        over.set()
        watcher.join()
