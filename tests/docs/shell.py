"""Runs commands that the documentation prints, in a shell like a reader's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.warm_python import folder


def run_printed(commands: str, cwd: Path, *, warm: bool = True) -> str:
    """Runs commands in bash with this environment's programs first on PATH; returns what they print.

    Without `warm` python, headrace and deepspeed are not forked from a server: for commands that look for processes.

    Raises AssertionError with the end of it when a command fails.
    """
    programs = [folder()] * warm + [Path(sys.executable).parent, os.environ["PATH"]]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=cwd,
        env={**os.environ, "PATH": os.pathsep.join(map(str, programs))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
