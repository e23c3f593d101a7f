"""The pre-pass of line deduplication: runs of line hashes -> ranges of hashes -> which lines each run drops.

A map task's lines are counted through, in the order of its documents; run number and line number together are the order
of the input. Everything is a `table`, and memory is that of a range.
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
from data_prep.dedup.table import Numbers, Range, join_slices, of_run, ranges, read_slice, run_and_index
from data_prep.task import Counts, DirectoryTask, Report

_TABLE, _WITHIN, _ACROSS = "lines", "within.bin", "across.bin"
_HELD = 1 << 20  # lines in memory at once, of 50 bytes or so


def write_lines(directory: Path, hashes: Iterable[NDArray[np.uint64]]) -> int:
    """Writes the lines of a map task's documents; returns how many can be compared.

    Memory is that of `_HELD` lines, however many there are.

    Args:
        hashes: `line_hashes` of one document after the other, of several at once.
    """
    scratch = directory / "sorted"
    scratch.mkdir()
    total, parts = 0, list[Path]()
    for first, held in _held(hashes):
        parts.append(scratch / f"{len(parts):05d}")
        total += _write_part(parts[-1], held, first)
    if len(parts) == 1:
        for file in parts[0].iterdir():
            file.rename(directory / file.name)
    else:
        _merge(parts, directory, total)
    shutil.rmtree(scratch)
    return total


def _held(hashes: Iterable[NDArray[np.uint64]]) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """The same by about `_HELD` lines, each time with the number of the first."""
    first, held, count = 0, list[NDArray[np.uint64]](), 0
    for some in hashes:
        held.append(some)
        count += len(some)
        if count >= _HELD:
            yield first, np.concatenate(held)
            first, held, count = first + count, [], 0
    if held:
        yield first, np.concatenate(held)


def _write_part(directory: Path, lines: NDArray[np.uint64], first: int) -> int:
    """Writes the table of some neighbouring lines, of which `first` is the first; returns how many can be compared."""
    assert first + len(lines) <= 1 << 32
    items = np.flatnonzero(lines != EXEMPT)
    items = items[np.argsort(lines[items], kind="stable")]
    directory.mkdir()
    np.save(directory / f"{_TABLE}.hashes.npy", lines[items][None, None])
    np.save(directory / f"{_TABLE}.items.npy", (items + first).astype(np.uint32)[None])
    return len(items)


def _merge(parts: Sequence[Path], directory: Path, total: int) -> None:
    """Makes one table of those of neighbouring parts, a range of hashes at a time."""
    cuts = max(1, -(-total // _HELD))
    with (
        _open_array(directory / f"{_TABLE}.hashes.npy", np.dtype("<u8"), (1, 1, total)) as hashes,
        _open_array(directory / f"{_TABLE}.items.npy", np.dtype("<u4"), (1, total)) as items,
    ):
        for cut in range(cuts if parts else 0):
            within = Range(cut, cuts)
            piece = join_slices([read_slice(0, part, _TABLE, row=0, within=within) for part in parts])
            hashes.write(piece.hashes.astype("<u8", copy=False).tobytes())
            items.write(piece.numbers.astype("<u4").tobytes())


@contextmanager
def _open_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterator[BinaryIO]:
    """A file for `np.load`, for the elements to be written to in order."""
    with path.open("wb") as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        yield file


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
            piece = read_slice(number, directory, _TABLE, row=0, within=self.within)
            over = piece.repeats(back=self.copies)
            found += _write(within, piece.numbers[over])
            kept.append(piece.take(~over))  # at most `copies` of a run, so a line that is everywhere stays small
        whole = join_slices(kept)
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
