"""A rank as a child process: its output and error in files, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from foundation.cli import ERROR_FILE
from foundation.processes import STOPPED, die_with_parent, state_of
from pipeline.runtime.launch.log_file import log_variable

_POLL_S = 0.05
_GRACE_S = 5.0
"""Seconds between a signal to terminate and SIGKILL."""
_TAIL_LINES, _TAIL_BYTES = 20, 1 << 16


@dataclass(frozen=True)
class RankProcess:
    """One rank.

    Attributes:
        number: global rank.
        process: process in a session of its own: Ctrl-C reaches only the parent process.
        output: file to which the rank writes; None for this process's own output.
        error: file to which the rank writes its error (`foundation.cli.guarded`).
    """

    number: int
    process: subprocess.Popen[bytes]
    output: Path | None
    error: Path

    @property
    def failed(self) -> bool:
        """Whether the rank has ended with a code other than 0."""
        return self.process.poll() not in (None, 0)

    def error_text(self) -> str:
        """Reads the rank's error, or the end of its output if it has written no error."""
        if self.error.exists():
            return self.error.read_text(errors="replace").rstrip()
        if self.output is None or not self.output.exists():
            return ""
        with self.output.open("rb") as file:
            file.seek(max(0, self.output.stat().st_size - _TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").rstrip().splitlines()[-_TAIL_LINES:])

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the rank and its children, if it runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def start_rank(
    command: Sequence[str], number: int, *, environ: Mapping[str, str], output: Path | None, error: Path
) -> RankProcess:
    """Starts a rank, which ends with this process.

    Args:
        command: command line of the rank.
        number: global rank.
        environ: environment of the rank, without the name of its error file.
        output: file to which the rank appends; None for this process's own output.
        error: file for the rank's error.
    """
    process = start_process(command, environ={**environ, ERROR_FILE: str(error), **log_variable(output)}, output=output)
    return RankProcess(number, process, output, error)


def start_process(
    command: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    output: Path | None,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, which ends with this one.

    Args:
        command: command line of the process.
        environ: environment variables; None for this process's own.
        output: file to which it appends; None for this process's own output.
        stdin: standard input, as `subprocess.Popen` takes it.
    """
    with ExitStack() as stack:
        file = None if output is None else stack.enter_context(output.open("ab"))
        return subprocess.Popen(
            command,
            env=environ,
            stdin=stdin,
            stdout=file,
            stderr=file and subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  there are no threads here
        )


def terminate(ranks: Iterable[RankProcess], number: signal.Signals, *, tick: Callable[[], None] = lambda: None) -> None:
    """Ends the remaining ranks and their children: first by signal `number`, if they can handle it, then by SIGKILL.

    Args:
        ranks: ranks that this process has started.
        number: signal that asks them to end.
        tick: called while they have time to end.
    """
    ranks, deadline = list(ranks), time.monotonic() + _GRACE_S
    for rank in ranks:
        rank.send(signal.SIGKILL if state_of(rank.process.pid)[0] == STOPPED else number)
    while time.monotonic() < deadline and any(rank.process.poll() is None for rank in ranks):
        tick()
        time.sleep(_POLL_S)
    for rank in ranks:
        rank.send(signal.SIGKILL)
        rank.process.wait()
