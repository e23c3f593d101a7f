"""Checks that tests make up for `headrace doctor`: modules in a folder on PYTHONPATH, and a doctor that runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.doctor.check import Check
from headrace.doctor.report import LINES
from tests.conftest import ROOT

HEAD = """\
import os, signal, subprocess, sys, time
from pathlib import Path
from headrace.doctor.check import Finding
"""
SLEEPS = """
def run(context):
    yield Finding(True, "about to sleep")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    child = "import os, time; os.fork(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-S", "-c", child, "MARK"], start_new_session=True)
    time.sleep(600)
"""
"""A check that hangs, deaf to signals, with a child in another session and a grandchild; MARK names them."""
_DOCTOR = """\
import json, sys
from pathlib import Path
from foundation.cli import guarded, leave
from headrace.doctor.check import Check, Context
from headrace.doctor.cluster import find_nodes
from headrace.doctor.command import diagnose
checks = [Check(**each) for each in json.loads(sys.argv[2])]
leave(guarded(lambda: diagnose(checks, Context(None, (), Path(sys.argv[1]), False, 0.0), find_nodes(None))))
"""


def write_modules(folder: Path, **texts: str) -> str:
    """Writes modules of checks; returns a PYTHONPATH on which they are."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(HEAD + text)
    return f"{ROOT}:{folder}"


def doctor_command(out: Path, checks: Sequence[Check]) -> list[str]:
    """The command of a real doctor, in a Python of its own, with these checks in place of the table's."""
    return [sys.executable, "-c", _DOCTOR, str(out), json.dumps([asdict(check) for check in checks])]


def read_findings(out: Path) -> list[dict[str, Any]]:
    """The findings in the JSON lines."""
    return [json.loads(line) for line in (out / LINES).read_text().splitlines()]


def processes_with(mark: str) -> list[int]:
    """Processes of this machine with a text in their command line, but for this one and its parents."""
    shown = subprocess.run(["pgrep", "-f", "--", mark], capture_output=True, text=True, check=False).stdout
    return [pid for pid in map(int, shown.split()) if pid not in (os.getpid(), os.getppid())]
