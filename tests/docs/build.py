"""Builds the documentation site once per session, strictly: a warning is an error."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.conftest import ROOT


@cache
def build_site() -> Path:
    """Builds the site into `out/site` and returns that folder.

    Raises:
        AssertionError: Zensical found a dead link or anything else to complain about.
    """
    program = Path(sys.executable).with_name("zensical")
    done = subprocess.run(
        [program, "build", "--strict", "--clean"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr, done.stdout + done.stderr
    return ROOT / "out" / "site"
