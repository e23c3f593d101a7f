"""Waiting processes that have done their imports, one for each rank of this node: a restart need not import again."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from foundation.cli import ERROR_FILE
from foundation.memory_size import available_memory
from pipeline.cluster.elastic.local_ranks import Command
from pipeline.runtime.launch.environment import RANK_STARTED
from pipeline.runtime.launch.log_file import log_variable
from pipeline.runtime.launch.rank_process import RankProcess, start_process

_ROOM_BYTES = 2 << 30
"""Bytes of host memory that must be available per process; each takes about 0.4 GB, half of it shared."""


class WarmRanks:
    """Processes that wait to become the ranks of the next start (`pipeline.cluster.elastic.warm_rank`).

    Args:
        command: the command that each rank runs.
        node: name of this node.
    """

    def __init__(self, command: Command, node: str) -> None:
        self._command, self._node = command, node
        self._waiting: dict[int, subprocess.Popen[bytes]] = {}

    def prepare(self) -> None:
        """Starts missing processes, where the host has memory for them."""
        for local in range(self._command.tasks):
            if (local not in self._waiting or self._waiting[local].poll() is not None) and _has_room():
                self._waiting[local] = self._start(local)

    def take(
        self, local: int, number: int, *, environ: Mapping[str, str], output: Path | None, error: Path
    ) -> RankProcess | None:
        """Turns a process that waits or still imports into a rank; None where there is no process.

        Args:
            local: rank within this node.
            number: global rank.
            environ: environment of the rank, without the name of its error file.
            output: file to which the rank appends; None for this process's own output.
            error: file for the rank's error.
        """
        process = self._waiting.pop(local, None)
        if process is None or process.poll() is not None:
            return None
        assert process.stdin is not None
        own = {ERROR_FILE: str(error), RANK_STARTED: str(time.time()), **log_variable(output)}
        order = {"environ": {**environ, **own}, "output": None if output is None else str(output)}
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.close()
        except OSError:  # the process has died meanwhile
            return None
        return RankProcess(number, process, output, error)

    def end(self) -> None:
        """Ends the processes that wait for a start."""
        for process in self._waiting.values():
            process.kill()
            process.wait()
        self._waiting.clear()

    def _start(self, local: int) -> subprocess.Popen[bytes]:
        python, _, *module = self._command.arguments
        self._command.logs.mkdir(parents=True, exist_ok=True)
        output = None if self._command.output is None else self._command.logs / f"waiting-{self._node}-{local}.log"
        return start_process(
            [python, "-m", "pipeline.cluster.elastic.warm_rank", *module], output=output, stdin=subprocess.PIPE
        )


def _has_room() -> bool:
    with suppress(OSError):
        return available_memory(Path("/proc/meminfo").read_text()) > _ROOM_BYTES
    return False
