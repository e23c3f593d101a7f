"""Runs the tests with the marker `gpu`, and collects their outcomes even where a time limit ends them early.

This module is also the pytest plugin that writes each outcome, as soon as it is known, to the file in `OUTCOMES`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.process import ROOT, Ended, run

OUTCOMES = "HEADRACE_GPU_CHECK_OUTCOMES"
_MARKED = re.compile(r"pytest\.mark\.gpu\b|from tests\.gpu\.device import")
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def gpu_test_files() -> list[str]:
    """The files with GPU tests; the file that starts complete runs is last, because it takes longest."""
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if _MARKED.search(path.read_text())]
    names = sorted(path.relative_to(ROOT).as_posix() for path in marked)
    return sorted(names, key=lambda name: name.endswith("test_gpu.py"))


def run_tests(work: Path, *, limit_s: float, env: dict[str, str]) -> dict[str, Any]:
    """Runs the GPU tests; returns each one's outcome, seconds and reason, and how pytest ended."""
    outcomes = work / "tests.jsonl"
    outcomes.unlink(missing_ok=True)
    options = ["-m", "gpu", "-q", "-p", "benchmarks.gpu_check.tests", "-p", "no:cacheprovider"]
    words = [sys.executable, "-m", "pytest", *options, "--continue-on-collection-errors", *gpu_test_files()]
    ended = run(words, log=work / "tests.log", limit_s=limit_s, env={**env, OUTCOMES: str(outcomes)})
    lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    found = [json.loads(line) for line in lines]
    counts = {kind: sum(each["outcome"] == kind for each in found) for kind in ("passed", "failed", "skipped")}
    return {"tests": found, **counts, "ended": _how(ended, limit_s)}


def _how(ended: Ended, limit_s: float) -> str:
    if ended.code is None:
        return f"ended by its time limit of {limit_s:.0f} s; the tests after the last one here were not run"
    return "finished" if ended.code in (0, 1) else f"pytest ended with exit code {ended.code}: {ended.last_line}"


def pytest_runtest_logreport(report: Any) -> None:
    """Records that a test was set up, called or torn down (pytest hook)."""
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.duration, report)


def pytest_collectreport(report: Any) -> None:
    """Records a collected file (pytest hook); a file that needs a missing package is listed as skipped."""
    if report.failed:
        missing = _MISSING.search(str(report.longrepr))
        _write(report.nodeid, "skipped" if missing else "failed", 0.0, report)
    elif report.skipped:
        _write(report.nodeid, "skipped", 0.0, report)


def _write(name: str, outcome: str, seconds: float, report: Any) -> None:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    missing = _MISSING.search(text)
    lines = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()[-1:]
    why = f"the package {missing[1]} is missing" if missing else " ".join(" ".join(lines[:3]).split())[:300]
    with Path(os.environ[OUTCOMES]).open("a") as file:
        file.write(json.dumps({"name": name, "outcome": outcome, "seconds": round(seconds, 2), "reason": why}) + "\n")
