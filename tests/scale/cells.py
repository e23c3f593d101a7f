"""Cells of the sweep: parts, each measured at all of its sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.scale.measuring import Figures
from tests.scale.page import judge, lines
from tests.scale.parts.all_parts import PARTS
from tests.sweeps.sweep import ROOT, CellResult


def groups() -> dict[str, list[str]]:
    """Group -> names of its parts."""
    found: dict[str, list[str]] = {}
    for part in PARTS.values():
        found.setdefault(part.group, []).append(part.name)
    return found


def run_cells(cells: Sequence[str]) -> dict[str, tuple[bool, str]]:
    """Measures parts, or skips those that cannot be; the note of one that was measured is JSON: size -> figures."""
    skipped = {cell: (True, f"skipped: {PARTS[cell].absent}") for cell in cells if PARTS[cell].absent}
    cells = [cell for cell in cells if cell not in skipped]
    command = [sys.executable, "-m", "tests.scale", *cells]
    memory = Path("/dev/shm")  # operations are counted, not timed
    env = os.environ | ({"TMPDIR": str(memory)} if memory.is_dir() else {})
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    told = {row["part"]: row for row in map(json.loads, done.stdout.splitlines())}
    ended = {"error": f"the process ended with code {done.returncode}", "figures": {}}
    rows = {cell: told.get(cell, ended) for cell in cells}
    found = {cell: (row["error"] is None, row["error"] or json.dumps(row["figures"])) for cell, row in rows.items()}
    return skipped | found


def body(results: Mapping[str, CellResult]) -> list[str]:
    """The page behind its table of cells."""
    judged, skipped = [], []
    for name, part in PARTS.items():
        if name in results and results[name].note.startswith("skipped: "):
            skipped.append(f"{name}: {results[name].note.removeprefix('skipped: ')}.")
        elif name in results and results[name].passed:
            figures = {int(size): Figures(**each) for size, each in json.loads(results[name].note).items()}
            if set(part.sizes) == set(figures):
                judged.append(judge(part, figures))
    return lines(judged, skipped)
