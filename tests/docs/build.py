"""Builds the documentation site once per process, strictly: a warning is an error."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

ZENSICAL = Path(sys.executable).with_name("zensical")


@cache
def build_site() -> Path:
    """Builds a copy of the documentation in a temporary folder; returns the folder of the built site.

    Skips the test where Zensical is not installed. Raises AssertionError for a dead link and any other warning.
    """
    if not ZENSICAL.exists():
        pytest.skip("zensical is not installed beside this Python")
    folder = tempfile.TemporaryDirectory(prefix="headrace-site-")
    atexit.register(folder.cleanup)
    work = Path(folder.name)
    shutil.copytree(ROOT / "docs", work / "docs")
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, work / name)
    done = subprocess.run(
        [ZENSICAL, "build", "--strict"],
        cwd=work,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower(), done.stdout + done.stderr
    return work / "out" / "site"
