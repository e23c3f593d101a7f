"""The committed tables name the cells that the code enumerates, and a sweep resumes where it stopped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sweeps import sweep as sweeps
from tests.sweeps.__main__ import run_cells
from tests.sweeps.all_sweeps import SWEEPS
from tests.sweeps.sweep import Sweep, digest_of

ROW = re.compile(r"^\| (?P<group>.+?) \| (?P<cells>\d+) \| \d+ \| \d+ \| \d+ \| `(?P<digest>\w+)` \|$", re.MULTILINE)


# mutants are drawn from the code, and change with it
@pytest.mark.parametrize("name", sorted(SWEEPS.keys() - {"mutations"}))
def test_the_committed_table_has_the_cells_that_the_code_enumerates(name: str) -> None:
    sweep = SWEEPS[name]()
    committed = {row["group"]: (int(row["cells"]), row["digest"]) for row in ROW.finditer(sweep.table_file.read_text())}
    enumerated = {group: (len(cells), digest_of(cells)) for group, cells in sweep.groups.items()}
    assert committed == enumerated, f"run: make sweep-{name} (or python -m tests.sweeps {name} --table)"


def test_a_sweep_that_was_stopped_runs_the_cells_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "STATE", tmp_path / "state")
    monkeypatch.setattr(sweeps, "TABLES", tmp_path / "tables")
    ran: list[str] = []

    def run(cells: Sequence[str]) -> dict[str, tuple[bool, str]]:
        if "c" in cells and "c" not in ran:
            ran.append("c")
            raise KeyboardInterrupt
        ran.extend(cells)
        return {cell: (cell != "b", f"{cell} is wrong" if cell == "b" else "") for cell in cells}

    sweep = Sweep("toy", "toys", "A cell is a letter.", {"one": ["a", "b"], "two": ["c"]}, run)
    with pytest.raises(KeyboardInterrupt):
        run_cells(sweep, sweep.remaining())
    assert sweep.remaining() == ["b", "c"]  # a failed cell is run again
    run_cells(sweep, sweep.remaining())
    assert ran == ["a", "b", "c", "b", "c"]
    text = sweep.table_file.read_text()
    assert "of which 3 were run and 2 passed" in text
    assert "- `b`: b is wrong" in text
