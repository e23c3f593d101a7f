"""The pre-pass of line deduplication: tables of line hashes -> ranges of hashes -> the lines that each run drops.

The lines of a map task, its "run" of lines, are numbered in the order of its documents. Run number and line number
together give the order of the input. All data are `table`s, and memory is that of one range.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data_prep.config.dedup import LinesSection
from data_prep.dedup.lines import EXEMPT
from data_prep.dedup.table import HashRange, Numbers, join_slices, ranges, read_slice, run_and_index, run_slice
from data_prep.formats.memory_map import map_file
from data_prep.task import Counts, DirectoryTask, Report

_TABLE, _WITHIN, _ACROSS = "lines", "within.bin", "across.bin"
_BLOCK_LINES = 1 << 20  # lines in memory at once, of about 50 bytes each


def write_line_hashes(directory: Path, hashes: Iterable[NDArray[np.uint64]]) -> int:
    """Writes the table of the lines of a map task's documents by an external sort, in memory for `_BLOCK_LINES` lines.

    Args:
        hashes: `line_hashes` of the documents, in order; an array has the lines of one or more documents.

    Returns:
        Number of lines to compare (not `EXEMPT`).
    """
    scratch = directory / "sorted"
    scratch.mkdir()
    total, parts = 0, list[Path]()
    for first, lines in _blocks(hashes):
        parts.append(scratch / f"{len(parts):05d}")
        total += _write_part(parts[-1], lines, first)
    if len(parts) == 1:
        for file in parts[0].iterdir():
            file.rename(directory / file.name)
    else:
        _merge(parts, directory, total)
    shutil.rmtree(scratch)
    return total


def _blocks(hashes: Iterable[NDArray[np.uint64]]) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """Regroups hashes into blocks of about `_BLOCK_LINES` lines, each with the number of its first line."""
    first, block, count = 0, list[NDArray[np.uint64]](), 0
    for some in hashes:
        block.append(some)
        count += len(some)
        if count >= _BLOCK_LINES:
            yield first, np.concatenate(block)
            first, block, count = first + count, [], 0
    if block:
        yield first, np.concatenate(block)


def _write_part(directory: Path, lines: NDArray[np.uint64], first: int) -> int:
    """Writes the table of consecutive lines, starting at number `first`; returns the number of lines to compare."""
    assert first + len(lines) <= 1 << 32
    items = np.flatnonzero(lines != EXEMPT)
    items = items[np.argsort(lines[items], kind="stable")]
    directory.mkdir()
    np.save(directory / f"{_TABLE}.hashes.npy", lines[items][None, None])
    np.save(directory / f"{_TABLE}.items.npy", (items + first).astype(np.uint32)[None])
    return len(items)


def _merge(parts: Sequence[Path], directory: Path, total: int) -> None:
    """Merges the tables of consecutive parts into one, a range of hashes at a time."""
    cuts = max(1, -(-total // _BLOCK_LINES))
    with (
        _open_array(directory / f"{_TABLE}.hashes.npy", np.dtype("<u8"), (1, 1, total)) as hashes,
        _open_array(directory / f"{_TABLE}.items.npy", np.dtype("<u4"), (1, total)) as items,
    ):
        for cut in range(cuts if parts else 0):
            within = HashRange(cut, cuts)
            merged = join_slices([read_slice(0, part, _TABLE, row=0, within=within) for part in parts])
            hashes.write(merged.hashes.astype("<u8", copy=False).tobytes())
            items.write(merged.numbers.astype("<u4").tobytes())


@contextmanager
def _open_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterator[BinaryIO]:
    """Opens an .npy file of this shape, for writing the elements in order."""
    with path.open("wb") as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        yield file


@dataclass(frozen=True)
class RepeatedLinesTask(DirectoryTask):
    """Finds the lines in a range of hashes that follow `kept_occurrences` equal lines, over all runs in order.

    It writes their numbers, int64 little-endian, ascending. `directory/within.bin` has lines that follow that many
    equal lines of their own run: these may be most of a corpus and are not kept in memory. `across.bin` has the rest.
    """

    kind = "dedup task"
    kept_occurrences: int
    within: HashRange
    runs: tuple[Path, ...]
    directory: Path

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        with (scratch / _WITHIN).open("wb") as within, (scratch / _ACROSS).open("wb") as across:
            done = {"lines": self._find(within, across)}
        report(Counts())
        return done

    def _find(self, within: BinaryIO, across: BinaryIO) -> int:
        found, kept = 0, []
        for number, directory in enumerate(self.runs):
            lines = read_slice(number, directory, _TABLE, row=0, within=self.within)
            repeated = lines.repeats(back=self.kept_occurrences)
            found += _write(within, lines.numbers[repeated])
            kept.append(lines.take(~repeated))  # at most `kept_occurrences` per hash and run: memory stays small
        merged = join_slices(kept)
        return found + _write(across, merged.numbers[merged.repeats(back=self.kept_occurrences)])


def repeated_lines_tasks(
    section: LinesSection, *, runs: Sequence[Path], lines: int, directory: Path
) -> list[RepeatedLinesTask]:
    """The tasks that find repeated lines.

    Args:
        runs: directories that `write_line_hashes` wrote, in the order of the input.
        lines: number of lines of all runs to compare.
        directory: parent of the tasks' directories.
    """
    return [
        RepeatedLinesTask(section.copies, within, tuple(runs), directory / f"lines-{within.part:05d}")
        for within in ranges(lines)
    ]


class DroppedLines:
    """The lines that one run drops, read document by document in the order in which its lines were hashed."""

    def __init__(self, tasks: Sequence[Path], *, run: int) -> None:
        """Opens the dropped lines of a run; `tasks`: directories of all finished `RepeatedLinesTask`s."""
        files = [directory / name for directory in tasks for name in (_WITHIN, _ACROSS)]
        self._lines = np.sort(np.concatenate([_lines_of_run(file, run) for file in files]))
        self._next_line = 0

    def next_document(self, lines: int) -> NDArray[np.bool_]:
        """Mask of the lines of the next document to drop: bool[lines]."""
        start, self._next_line = self._next_line, self._next_line + lines
        first, end = np.searchsorted(self._lines, [start, self._next_line])
        dropped = np.zeros(lines, dtype=bool)
        dropped[self._lines[first:end] - start] = True
        return dropped


def _write(file: BinaryIO, numbers: Numbers) -> int:
    file.write(np.sort(numbers).astype("<i8", copy=False).tobytes())
    return len(numbers)


def _lines_of_run(file: Path, run: int) -> Numbers:
    numbers = map_file(file).view("<i8")
    return run_and_index(numbers[run_slice(numbers, run)])[1]
