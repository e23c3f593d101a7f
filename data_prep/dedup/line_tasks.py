"""The pre-pass of line deduplication: runs of line hashes -> ranges of hashes -> which lines each run drops.

A map task's lines are counted through, in the order of its documents; run number and line number together are the order
of the input. Everything is a `table`, and memory is that of a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data_prep.dedup.lines import EXEMPT
from data_prep.dedup.section import LinesSection
from data_prep.dedup.table import Numbers, Range, join_pieces, of_run, ranges, read_piece, run_and_index
from data_prep.tasks.base import Counts, DirectoryTask, Report

_TABLE, _WITHIN, _ACROSS = "lines", "within.bin", "across.bin"


def write_lines(directory: Path, hashes: Sequence[NDArray[np.uint64]]) -> int:
    """Writes the lines of a map task's documents, `line_hashes` of each in order; returns how many can be compared."""
    joined = np.concatenate([np.empty(0, dtype=np.uint64), *hashes])
    items = np.flatnonzero(joined != EXEMPT).astype(np.uint32)
    order = np.argsort(joined[items], kind="stable")
    np.save(directory / f"{_TABLE}.hashes.npy", joined[items][order][None, None])
    np.save(directory / f"{_TABLE}.items.npy", items[order][None])
    return len(items)


@dataclass(frozen=True)
class LinesTask(DirectoryTask):
    """Finds the lines in a range of hashes that come after `copies` equal ones, over all runs in their order.

    Writes their numbers, int64 little-endian, ascending: to `directory/within.bin` those with so many equal ones before
    them in their own run, which may be most of a corpus and are not kept in memory, and to `across.bin` the rest.
    """

    copies: int
    within: Range
    runs: tuple[Path, ...]
    directory: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"dedup task {self.directory.name}"

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        with (scratch / _WITHIN).open("wb") as within, (scratch / _ACROSS).open("wb") as across:
            done = {"lines": self._find(within, across)}
        report(Counts())
        return done

    def _find(self, within: BinaryIO, across: BinaryIO) -> int:
        found, kept = 0, []
        for number, directory in enumerate(self.runs):
            piece = read_piece(number, directory, _TABLE, row=0, within=self.within)
            over = piece.repeats(back=self.copies)
            found += _write(within, piece.numbers[over])
            kept.append(piece.take(~over))  # at most `copies` of a run, so a line that is everywhere stays small
        whole = join_pieces(kept)
        return found + _write(across, whole.numbers[whole.repeats(back=self.copies)])


def lines_tasks(section: LinesSection, *, runs: Sequence[Path], lines: int, directory: Path) -> list[LinesTask]:
    """The tasks for `lines` lines that can be compared, in `runs`, whose order is that of the input."""
    return [
        LinesTask(section.copies, within, tuple(runs), directory / f"lines-{within.part:05d}")
        for within in ranges(lines)
    ]


class DroppedLines:
    """What one run drops, handed out document by document in the order in which its lines were hashed."""

    def __init__(self, tasks: Sequence[Path], *, run: int) -> None:
        """`tasks`: the directories of all `LinesTask`s, finished."""
        files = [directory / name for directory in tasks for name in (_WITHIN, _ACROSS)]
        self._lines = np.sort(np.concatenate([_of_run(file, run) for file in files]))
        self._line = 0

    def take(self, lines: int) -> NDArray[np.bool_]:
        """bool[lines]: which of the next document's lines are dropped."""
        start, self._line = self._line, self._line + lines
        first, end = np.searchsorted(self._lines, [start, self._line])
        dropped = np.zeros(lines, dtype=bool)
        dropped[self._lines[first:end] - start] = True
        return dropped


def _write(file: BinaryIO, numbers: Numbers) -> int:
    file.write(np.sort(numbers).astype("<i8", copy=False).tobytes())
    return len(numbers)


def _of_run(file: Path, run: int) -> Numbers:
    if not file.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype=np.int64)
    numbers = np.memmap(file, dtype="<i8", mode="r")
    return run_and_index(numbers[of_run(numbers, run)])[1]
