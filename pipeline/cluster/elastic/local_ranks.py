"""The ranks of one start on this node."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.cluster.elastic.files import RanksPlan
from pipeline.runtime.launch.environment import AGENT_STARTS
from pipeline.runtime.launch.rank_process import RankProcess, start_rank, terminate

_MOST = 4000
_ERROR = re.compile(r"(\[rank\d+\]: )?(error\b|\S+: error: |[\w.]*(Error|Exception)\b)")
"""Beginning of a line that names an error: ours, argparse's, or the last line of a traceback."""


@dataclass(frozen=True)
class Command:
    """The command that every rank runs.

    Attributes:
        arguments: command line of a rank's process.
        tasks: number of ranks on each node.
        logs: directory for the output of all ranks but rank 0, and for the errors of all ranks.
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
        command: the command that each rank runs.
        plan: plan that has this node among its members.
        node: name of this node.
        take: turns a waiting process that has done its imports into a rank, if there is one (`WarmRanks.take`).
    """

    command: Command
    plan: RanksPlan
    node: str
    take: Callable[..., RankProcess | None] | None = None
    _ranks: list[RankProcess] = field(default_factory=list)
    _codes: dict[int, int] = field(default_factory=dict)

    def start(self) -> None:
        """Starts the ranks."""
        self.command.logs.mkdir(parents=True, exist_ok=True)
        self._ranks += [self._start(local) for local in range(self.command.tasks)]

    def codes(self) -> dict[int, int]:
        """Returns the exit codes of the ranks that have ended, in the order in which this node saw them end."""
        for rank in self._ranks:
            if rank.number not in self._codes and rank.process.poll() is not None:
                self._codes[rank.number] = rank.process.returncode
        return dict(self._codes)

    @property
    def running(self) -> bool:
        """Whether any of the ranks runs."""
        return len(self.codes()) < len(self._ranks)

    def error(self) -> str:
        """Returns the cause of the first failed rank in one line; below it the rank's report or the end of its output.

        Empty where no rank has failed.
        """
        number = next((number for number, code in self.codes().items() if code), None)
        if number is None:
            return ""
        [rank], code = [rank for rank in self._ranks if rank.number == number], self._codes[number]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        name, text = f"rank {number} on {self.node} {how}", rank.error_text()
        cause = f" {cause_of(text)}" if code > 0 else ""  # the output of a killed rank tells no cause
        return f"{name}:{cause}\n{text}"[:_MOST] if text else name

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the ranks that run."""
        for rank in self._ranks:
            rank.send(number)

    def end(self, *, tick: Callable[[], None]) -> None:
        """Ends the ranks that still run, within some seconds.

        Args:
            tick: called while they end.
        """
        terminate(self._ranks, signal.SIGTERM, tick=tick)

    def _start(self, local: int) -> RankProcess:
        number = self.plan.members.index(self.node) * self.command.tasks + local
        logs, start = self.command.logs, self.plan.start
        error = logs / f"start-{start}-rank-{number}.error"
        error.unlink(missing_ok=True)  # left by an earlier job
        environ = {
            **os.environ,
            AGENT_STARTS: str(start),
            "RANK": str(number),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(len(self.plan.members) * self.command.tasks),
            "MASTER_ADDR": self.plan.address,
            "MASTER_PORT": str(self.plan.port),
        }
        output = self.command.output if number == 0 else logs / f"rank-{number}.log"
        warm = self.take and self.take(local, number, environ=environ, output=output, error=error)
        return warm or start_rank(self.command.arguments, number, environ=environ, output=output, error=error)


def cause_of(text: str) -> str:
    """Finds the cause in a rank's error or output, in one line: its last error, with the line below that says why.

    For another program's error it is the line with the program's name; without any error, the last line.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    found = [number for number, line in enumerate(lines) if _ERROR.match(line)]
    if not found:
        return lines[-1].strip() if lines else ""
    first = found[-1]
    return "; ".join(line.strip() for line in lines[first : first + (2 if lines[first].startswith("error") else 1)])
