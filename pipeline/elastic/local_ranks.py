"""The ranks of one start on this node."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from headrace.base.cli import ERROR_FILE
from headrace.base.processes import STOPPED, die_with_parent, state_of
from pipeline.elastic.files import Plan
from pipeline.launch.environment import AGENT_STARTS

_GRACE_S, _POLL_S = 5.0, 0.05
_TAIL_LINES, _MOST = 20, 4000


@dataclass(frozen=True)
class Command:
    """What every rank runs.

    Attributes:
        arguments: of the process.
        tasks: ranks of each node.
        logs: directory for what the ranks write, but for rank 0, and for their errors.
        output: file that rank 0 appends to; None for this process's own output.
    """

    arguments: Sequence[str]
    tasks: int
    logs: Path
    output: Path | None = None


@dataclass
class LocalRanks:
    """The ranks that a plan gives this node.

    Args:
        command: what they run.
        plan: has this node among its members.
        node: its name.
    """

    command: Command
    plan: Plan
    node: str
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _codes: dict[int, int] = field(default_factory=dict)

    def start(self) -> None:
        """Starts them."""
        self.command.logs.mkdir(parents=True, exist_ok=True)
        first = self.plan.members.index(self.node) * self.command.tasks
        for local in range(self.command.tasks):
            self._processes[first + local] = self._start(first + local, local)

    def codes(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended, in the order in which that was seen."""
        for rank, process in self._processes.items():
            if rank not in self._codes and process.poll() is not None:
                self._codes[rank] = process.returncode
        return dict(self._codes)

    @property
    def running(self) -> bool:
        """Whether one of them runs."""
        return len(self.codes()) < len(self._processes)

    def error(self) -> str:
        """Of the first that failed: what it reported, or the end of its output; empty where none has."""
        failed = next((rank for rank, code in self.codes().items() if code), None)
        if failed is None:
            return ""
        code = self._codes[failed]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        report = self._error_file(failed)
        text = report.read_text(errors="replace").rstrip() if report.is_file() else self._tail(failed)
        name = f"rank {failed} on {self.node} {how}"
        return f"{name}:\n{text}"[:_MOST] if text else name

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to those that run."""
        for process in self._processes.values():
            self._send(process, number)

    def end(self, *, tick: Callable[[], None]) -> None:
        """Ends those that still run, within some seconds.

        Args:
            tick: is called meanwhile.
        """
        for process in self._processes.values():
            stopped = state_of(process.pid)[0] == STOPPED
            self._send(process, signal.SIGKILL if stopped else signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while self.running and time.monotonic() < deadline:
            tick()
            time.sleep(_POLL_S)
        self.send(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def _start(self, rank: int, local: int) -> subprocess.Popen[bytes]:
        self._error_file(rank).unlink(missing_ok=True)
        environ = {
            **os.environ,
            AGENT_STARTS: str(self.plan.start),
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(len(self.plan.members) * self.command.tasks),
            "MASTER_ADDR": self.plan.address,
            "MASTER_PORT": str(self.plan.port),
            ERROR_FILE: str(self._error_file(rank)),
        }
        log = self._log(rank)
        with ExitStack() as stack:
            file = None if log is None else stack.enter_context(log.open("ab"))
            return subprocess.Popen(
                self.command.arguments,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file and subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  there are no threads here
            )

    def _log(self, rank: int) -> Path | None:
        return self.command.output if rank == 0 else self.command.logs / f"rank-{rank}.log"

    def _error_file(self, rank: int) -> Path:
        return self.command.logs / f"start-{self.plan.start}-rank-{rank}.error"

    def _tail(self, rank: int) -> str:
        log = self._log(rank)
        if log is None or not log.is_file():
            return ""
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2 * _MOST))
            return "\n".join(file.read().decode(errors="replace").rstrip().splitlines()[-_TAIL_LINES:])

    def _send(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        if process.poll() is None:
            os.killpg(process.pid, number)
