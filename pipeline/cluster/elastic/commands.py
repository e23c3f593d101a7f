"""Runs other programs for an agent, whose heartbeats go on meanwhile."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

_POLL_S = 0.1


@dataclass
class Commands:
    """Runs commands.

    Attributes:
        tick: called while a command runs (`Agent.tick`).
    """

    tick: Callable[[], None] = lambda: None

    def run(
        self, command: Sequence[str], *, environ: Mapping[str, str] | None = None, timeout_s: float = float("inf")
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; a missing command or one that exceeds the timeout counts as failed with code 1.

        Args:
            command: command line, which gets no standard input.
            environ: environment variables; None for this process's own.
            timeout_s: seconds after which it is killed.
        """
        deadline, pipe, none = time.monotonic() + timeout_s, subprocess.PIPE, subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                command, env=environ, text=True, start_new_session=True, stdin=none, stdout=pipe, stderr=pipe
            )
        except OSError as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))
        with process:
            while time.monotonic() < deadline:
                self.tick()
                with suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(timeout=_POLL_S)
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
            process.kill()
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} has not ended within {timeout_s:g} s")
