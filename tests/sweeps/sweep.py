"""A sweep: cells that take hours to run, resumable, with a committed table of which cells passed.

Every result is appended to `out/sweeps/NAME.jsonl` as soon as a cell has run; a sweep that is started again runs the
cells that are left. The table in `docs/sweeps/NAME.md` names the date, the commit, the versions and the failed cells. A
test compares its cells with those that the code enumerates today.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from foundation.directory import code_version

ROOT = Path(__file__).resolve().parents[2]
STATE, TABLES = ROOT / "out" / "sweeps", ROOT / "docs" / "sweeps"
_PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers")


@dataclass(frozen=True)
class CellResult:
    """What running a cell gave.

    Attributes:
        cell: its name.
        passed: whether everything it checks held.
        note: figures, or why it failed; one line.
        seconds: it took.
        commit: commit of the code that ran the cell.
        date: UTC, YYYY-MM-DD.
    """

    cell: str
    passed: bool
    note: str
    seconds: float
    commit: str
    date: str


@dataclass(frozen=True)
class Sweep:
    """One kind of cells.

    Attributes:
        name: NAME in the make target `make sweep-NAME` and in the names of files.
        title: heading of the table.
        what: description of a cell and its check, for the table.
        groups: group -> names of its cells.
        run: runs some cells; cell -> (passed, one line about it).
        batch: how many cells are run at one time.
        failed: heading of the list of cells that did not pass.
        passed: heading of the list of cells that did, with what was noted of each; None for no list.
        columns: headings of a table in the place of these lists, whose notes are columns separated by " | ".
        page: page of the docs with the table; None for `docs/sweeps/NAME.md`.
        body: makes the lines behind the table of the results, in the place of these lists.
    """

    name: str
    title: str
    what: str
    groups: Mapping[str, Sequence[str]]
    run: Callable[[Sequence[str]], Mapping[str, tuple[bool, str]]]
    batch: int = 1
    failed: str = "Failed cells"
    passed: str | None = None
    columns: Sequence[str] = ()
    page: Path | None = None
    body: Callable[[Mapping[str, CellResult]], Sequence[str]] | None = None

    @property
    def cells(self) -> list[str]:
        """All cells, group by group."""
        return [cell for cells in self.groups.values() for cell in cells]

    @property
    def state_file(self) -> Path:
        """Where results are appended."""
        return STATE / f"{self.name}.jsonl"

    @property
    def table_file(self) -> Path:
        """The committed table."""
        return self.page or TABLES / f"{self.name}.md"

    def results(self) -> dict[str, CellResult]:
        """Results so far of cells that still exist; a cell that was run twice has its last result."""
        if not self.state_file.exists():
            return {}
        rows = [json.loads(line) for line in self.state_file.read_text().splitlines()]
        known = set(self.cells)
        return {row["cell"]: CellResult(**row) for row in rows if row["cell"] in known}

    def remaining(self) -> list[str]:
        """Cells that have no result yet, or whose last result is a failure."""
        found = self.results()
        return [cell for cell in self.cells if cell not in found or not found[cell].passed]

    def record(self, results: Sequence[CellResult]) -> None:
        """Appends results and writes the table anew."""
        self.state_file.parent.mkdir(parents=True, exist_ok=True)
        with self.state_file.open("a") as file:
            file.writelines(json.dumps(asdict(result)) + "\n" for result in results)
        self.write_table()

    def write_table(self) -> None:
        """Writes the committed table from the results so far."""
        self.table_file.parent.mkdir(parents=True, exist_ok=True)
        self.table_file.write_text(table(self, self.results()))


def table(sweep: Sweep, results: Mapping[str, CellResult]) -> str:
    """The table as Markdown: one row per group, and every failed cell by name."""
    dates = sorted({result.date for result in results.values()})
    commits = sorted({result.commit[:12] for result in results.values()})
    when = f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else dates[0] if dates else "not run yet"
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    good = [results[cell] for cell in sweep.cells if cell in results and results[cell].passed]
    lines = [
        f"# {sweep.title}" if sweep.page else f"# Sweep: {sweep.title}",
        "",
        wrapped(sweep.what),
        "",
        f"    make sweep-{sweep.name}",
        "",
        wrapped(f"- Run: {when}; commits {', '.join(commits) or '-'}"),
        f"- Versions: Python {platform.python_version()}, {versions}; {os.cpu_count()} cores, no GPU",
        f"- Cells: {len(sweep.cells)}, of which {len(results)} were run and {len(good)} passed",
        "",
        "| group | cells | run | passed | failed | names of the cells (SHA-256) |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for group, cells in sweep.groups.items():
        run = [results[cell] for cell in cells if cell in results]
        passed, digest = sum(result.passed for result in run), digest_of(cells)
        lines.append(f"| {group} | {len(cells)} | {len(run)} | {passed} | {len(run) - passed} | `{digest}` |")
    if sweep.body is not None:
        lines += ["", *sweep.body(results)]
    if sweep.passed and good:
        lines += ["", f"## {sweep.passed}", "", *_listed(sweep, good)]
    failed = [results[cell] for cell in sweep.cells if cell in results and not results[cell].passed]
    lines += ["", f"## {sweep.failed}", "", *_listed(sweep, failed)] if failed else []
    return "\n".join([*lines, ""])


def wrapped(text: str) -> str:
    """A paragraph or list item in lines of 120 characters."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _listed(sweep: Sweep, results: Sequence[CellResult]) -> list[str]:
    if not sweep.columns:
        return [wrapped(f"- `{each.cell}`: {each.note}") for each in results]
    head = [f"| {' | '.join(sweep.columns)} |", "|---" * len(sweep.columns) + "|"]
    return [*head, *(f"| {each.cell} | {each.note} |" for each in results)]


def digest_of(cells: Sequence[str]) -> str:
    """Twelve hexadecimal digits that change when a cell is added, removed or renamed."""
    return hashlib.sha256("\n".join(sorted(cells)).encode()).hexdigest()[:12]


def result_of(cell: str, outcome: tuple[bool, str], *, seconds: float) -> CellResult:
    """A result of today, at this commit."""
    passed, note = outcome
    commit = code_version()["commit"] or "-"
    return CellResult(
        cell, passed, note.splitlines()[0] if note else "", seconds, commit, f"{datetime.now(UTC):%Y-%m-%d}"
    )
