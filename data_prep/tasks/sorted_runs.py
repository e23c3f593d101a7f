"""Runs: what map tasks leave for reduce tasks. Documents sorted by (split, source, key), so that a shard is a slice.

    RUN/tokens.bin    token ids back to back, BOS and EOS included
    RUN/docs.bin      one `DOCUMENT` each
    RUN/mask.bin      a byte for each token, 1 where it is learnt; only in jobs with conversations
    RUN/run.json      how many documents, and their groups: [split, source, first document, end]

and, for dedup, what `dedup.documents.write_dedup_tables` writes.

A run holds what fits into `RUN_BYTES` of memory, ids and all that is known of documents together; a task writes as many
as it needs. Where they are cut changes no shard.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from data_prep.dedup.document_tasks import write_dedup_tables
from data_prep.formats.memory_map import map_file
from data_prep.hashing import U64
from data_prep.tokenizer.engines import Tokens
from headrace.base.directory import write_json
from headrace.base.errors import DataError

Array = npt.NDArray[Any]

RUN_BYTES = 64 << 20
DOCUMENT = np.dtype(
    [
        ("key", "<u8"),
        ("start", "<i8"),
        ("rank", "<i8"),
        ("bytes", "<i8"),
        ("at", "<i8"),
        ("unit", "<u4"),
        ("tokens", "<i4"),
        ("source", "<u2"),
        ("split", "u1"),
    ]
)
"""A document of a run.

key: its place in the order of its source. start: its first token in the run. rank: its place in the order of the input.
bytes: UTF-8 of its text. at: its place in its file. unit: number of its unit in the task. tokens: with BOS and EOS.
source: number in the config. split: number in `SPLITS`.
"""
_DOCUMENT_BYTES = 512  # that a document takes besides its ids and facts, when they are sorted and written
_PIECE_BYTES = 4 << 20
_TOKENS, _MASK, _DOCUMENTS, _RUN = "tokens.bin", "mask.bin", "docs.bin", "run.json"


@dataclass(frozen=True)
class Facts:
    """What is known of documents beside their tokens; arrays of one length. See `DOCUMENT`.

    hashes: uint64 [n, 2] or None. bands: uint64 [n, bands] or None.
    """

    key: U64
    rank: Array
    bytes: Array
    source: Array
    split: Array
    at: Array
    unit: Array
    hashes: U64 | None = None
    bands: U64 | None = None

    @property
    def nbytes(self) -> int:
        """Size of all columns."""
        return sum(column.nbytes for column in vars(self).values() if column is not None)

    def take(self, which: Array) -> Facts:
        """Some of the documents."""
        taken: dict[str, Any] = {k: None if column is None else column[which] for k, column in vars(self).items()}
        return Facts(**taken)


@dataclass
class RunWriter:
    """Collects documents of a map task and writes them as runs `DIRECTORY/run-000` and on.

    Args:
        before, after: ids that frame every document.
        masked: whether tokens come with a loss mask.
    """

    directory: Path
    dtype: np.dtype[Any]
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    masked: bool = False
    runs: int = 0
    _used: int = 0
    _facts_bytes: int = 0
    _ids: Array = field(init=False)
    _mask: Array = field(init=False)
    _lengths: list[Array] = field(default_factory=list)
    _facts: list[Facts] = field(default_factory=list)
    _framed: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        # of what a run never fills the system gives no memory
        self._ids = np.empty(RUN_BYTES // self.dtype.itemsize, self.dtype)
        self._mask = np.empty(len(self._ids) if self.masked else 0, np.uint8)

    def add(self, tokens: Tokens, facts: Facts, *, mask: Array | None = None) -> None:
        """Adds the documents of a batch, all of which have tokens.

        Args:
            mask: uint8 [n], which of the ids are learnt; None: all are, and what frames them.
        """
        self._fit(len(tokens.ids))
        np.copyto(self._ids[self._used : self._used + len(tokens.ids)], tokens.ids, casting="unsafe")
        if self.masked:
            self._mask[self._used : self._used + len(tokens.ids)] = 1 if mask is None else mask
            self._framed.append(np.full(len(facts.key), mask is None))
        self._used += len(tokens.ids)
        self._lengths.append(np.diff(tokens.offsets))
        self._facts.append(facts)
        self._facts_bytes += facts.nbytes + _DOCUMENT_BYTES * len(facts.key)
        if self._used * (self.dtype.itemsize + self.masked) + self._facts_bytes >= RUN_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what has been collected as a run."""
        if not self._facts:
            return
        run = run_path(self.directory, self.runs)
        run.mkdir()
        lengths, facts = np.concatenate(self._lengths), _joined(self._facts)
        order = np.lexsort((facts.rank, facts.key, facts.source, facts.split))
        self._write_pieces(run / _TOKENS, self._ids, lengths, order, self._frames(len(order)))
        if self.masked:
            self._write_pieces(run / _MASK, self._mask, lengths, order, self._mask_frames())
        _write_documents(run, lengths[order] + len(self.before) + len(self.after), facts.take(order))
        self.runs += 1
        self._used, self._facts_bytes, self._lengths, self._facts, self._framed = 0, 0, [], [], []

    def _fit(self, more: int) -> None:
        if self._used + more > len(self._ids):
            self._ids = self._grown(self._ids, self._used + more)
        if self.masked and len(self._mask) < len(self._ids):
            self._mask = self._grown(self._mask, len(self._ids))

    def _grown(self, values: Array, size: int) -> Array:
        grown = np.empty(size, values.dtype)
        grown[: self._used] = values[: self._used]
        return grown

    def _frames(self, documents: int) -> list[tuple[bytes, bytes]]:
        """What stands before and after each document."""
        frame = np.array(self.before, self.dtype).tobytes(), np.array(self.after, self.dtype).tobytes()
        return [frame] * documents

    def _mask_frames(self) -> list[tuple[bytes, bytes]]:
        """A text's frame is learnt, a conversation's is not: its template has an end of its own."""
        sizes = len(self.before), len(self.after)
        frames = [(bytes([learnt]) * sizes[0], bytes([learnt]) * sizes[1]) for learnt in (0, 1)]
        return [frames[int(learnt)] for learnt in np.concatenate(self._framed)]

    @staticmethod
    def _write_pieces(
        path: Path, values: Array, lengths: Array, order: Array, frames: list[tuple[bytes, bytes]]
    ) -> None:
        """Writes the values of each document, framed, in order."""
        data, size = values.view(np.uint8).data, values.itemsize
        ends = np.cumsum(lengths)
        first, last = ((ends - lengths)[order] * size).tolist(), (ends[order] * size).tolist()
        framed = [frames[i] for i in order.tolist()]
        with path.open("wb") as file:
            for piece in _pieces(last, first):
                parts: list[Any] = []
                for i in piece:
                    before, after = framed[i]
                    parts += (before, data[first[i] : last[i]], after)
                file.write(b"".join(parts))


class RunStream:
    """Writes a run of any size, from documents that come in its order."""

    def __init__(self, run: Path, *, masked: bool) -> None:
        """Makes the directory `run`."""
        run.mkdir()
        self._run, self._tokens = run, 0
        self._groups: list[list[int]] = []
        self._documents = 0
        names = [_TOKENS, _DOCUMENTS, *([_MASK] if masked else [])]
        self._files = {name: (run / name).open("wb") for name in names}

    def add(self, documents: Array, ids: Sequence[memoryview], mask: Sequence[memoryview]) -> None:
        """Adds documents, of one split and source.

        Args:
            documents: `DOCUMENT` [n].
            ids, mask: the bytes of each one's tokens and of their mask; no mask where there is none.
        """
        if not len(documents):
            return
        group = [int(documents["split"][0]), int(documents["source"][0])]
        if not self._groups or self._groups[-1][:2] != group:
            self._groups.append([*group, self._documents, self._documents])
        made, ends = documents.copy(), np.cumsum(documents["tokens"], dtype=np.int64)
        made["start"] = self._tokens + ends - documents["tokens"]
        self._tokens += int(ends[-1])
        self._documents += len(documents)
        self._groups[-1][3] = self._documents
        self._files[_DOCUMENTS].write(made.view(np.uint8).data)
        for name, pieces in ((_TOKENS, ids), (_MASK, mask)):
            for piece in pieces:
                self._files[name].write(piece)

    def __enter__(self) -> RunStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        for file in self._files.values():
            file.close()
        if kind is None:
            write_json(self._run / _RUN, {"documents": self._documents, "groups": self._groups})


@dataclass(frozen=True)
class SortedRun:
    """An open run, memory-mapped. documents: `DOCUMENT` [n]; groups: {(split, source): (first, end)}."""

    path: Path
    documents: Array
    groups: dict[tuple[int, int], tuple[int, int]]

    @classmethod
    def open(cls, path: Path, *, whole: bool = False) -> SortedRun:
        """Maps a run.

        Args:
            path: its directory.
            whole: all documents will be looked at, and not only some.

        Raises:
            DataError: it is incomplete, though its task has finished.
        """
        try:
            said = json.loads((path / _RUN).read_text())
            documents = map_file(path / _DOCUMENTS, random_access=not whole).view(DOCUMENT)
            if len(documents) != said["documents"]:
                raise ValueError(f"{_DOCUMENTS} holds {len(documents)} documents, and {said['documents']} were written")
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is damaged: {error}\n  try: remove {path.parent} and run again") from None
        return cls(path, documents, {(split, source): (first, end) for split, source, first, end in said["groups"]})

    def between(self, group: tuple[int, int], low: int, high: int) -> tuple[int, int]:
        """Documents [first, end) of a group whose keys are in [low, high). Reads a few pages, however large the run."""
        if group not in self.groups:
            return 0, 0
        first, end = self.groups[group]
        keys = self.documents["key"]  # np.searchsorted would read all of them: they do not lie side by side
        start, stop = (bisect_left(keys, bound, first, end) if bound < 1 << 64 else end for bound in (low, high))
        return start, stop

    def read_tokens(self, documents: Array, into: Array) -> None:
        """Reads the ids of some documents that follow one another."""
        self._read(_TOKENS, documents, into)

    def read_mask(self, documents: Array, into: Array) -> None:
        """Reads for each of those ids whether it is learnt, uint8."""
        self._read(_MASK, documents, into)

    def _read(self, name: str, documents: Array, into: Array) -> None:
        path, left = self.path / name, into.view(np.uint8).data
        with path.open("rb", buffering=0) as file:
            file.seek(int(documents["start"][0]) * into.itemsize)
            while left and (count := file.readinto(left)):
                left = left[count:]
        if left:
            raise DataError(f"{path} ends early\n  try: remove {self.path.parent} and run again")


@dataclass(frozen=True)
class SortedRunPaths(Sequence[Path]):
    """The runs of map tasks that follow one another. It pickles small, and so do slices: every later task has one.

    Args:
        directories: where the tasks' directories are, `00000` and on.
        counts: how many runs each has, from task `first` on. skip: how many of the first one's are left out.
    """

    directories: Path
    counts: tuple[int, ...]
    first: int = 0
    skip: int = 0

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.counts))

    def __len__(self) -> int:
        return self._ends[-1] - self.skip if self._ends else 0

    @overload
    def __getitem__(self, i: int) -> Path: ...

    @overload
    def __getitem__(self, i: slice) -> SortedRunPaths: ...

    def __getitem__(self, i: int | slice) -> Path | SortedRunPaths:
        if isinstance(i, slice):
            start, end, step = i.indices(len(self))
            assert step == 1
            return self._between(start, max(start, end))
        if not 0 <= i < len(self):
            raise IndexError(i)
        task, run = self._place(i)
        return run_path(task_directory(self.directories, self.first + task), run)

    def _place(self, i: int) -> tuple[int, int]:
        """Run number `i`: which of the tasks it is of, and its number there."""
        task = bisect_right(self._ends, i + self.skip)
        return task, i + self.skip - self._ends[task] + self.counts[task]

    def _between(self, start: int, end: int) -> SortedRunPaths:
        if start == end:
            return SortedRunPaths(self.directories, ())
        (task, run), (last, until) = self._place(start), self._place(end - 1)
        return SortedRunPaths(self.directories, (*self.counts[task:last], until + 1), self.first + task, run)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_ends"}


def task_directory(directories: Path, task: int) -> Path:
    """Where map task number `task` leaves its result."""
    return directories / f"{task:05d}"


def run_path(directory: Path, run: int) -> Path:
    """Run number `run` of a map task."""
    return directory / f"run-{run:03d}"


def runs_of(directory: Path) -> list[Path]:
    """The runs that a map task has left, in order."""
    return sorted(directory.glob("run-*"))


def _write_documents(run: Path, tokens: Array, facts: Facts) -> None:
    documents = np.zeros(len(tokens), DOCUMENT)
    documents["tokens"], documents["start"][1:] = tokens, np.cumsum(tokens)[:-1]
    for name in ("key", "rank", "bytes", "source", "split", "at", "unit"):
        documents[name] = getattr(facts, name)
    with (run / _DOCUMENTS).open("wb") as file:  # tofile says nothing of a full disk but how much it wrote
        file.write(documents.view(np.uint8).data)
    if facts.hashes is not None or facts.bands is not None:
        write_dedup_tables(run, rank=facts.rank, hashes=facts.hashes, bands=facts.bands)
    write_json(run / _RUN, {"documents": len(documents), "groups": _groups(documents)})


def _groups(documents: Array) -> list[list[int]]:
    which = documents["split"].astype(np.int64) << 16 | documents["source"]
    cuts = [0, *(np.flatnonzero(np.diff(which)) + 1).tolist(), len(which)]
    return [[int(which[a]) >> 16, int(which[a]) & 0xFFFF, a, b] for a, b in pairwise(cuts)]


def _joined(parts: list[Facts]) -> Facts:
    def joined(name: str) -> Any:
        columns = [getattr(part, name) for part in parts]
        return None if columns[0] is None else np.concatenate(columns)

    return Facts(**{name: joined(name) for name in vars(parts[0])})


def _pieces(last: list[int], first: list[int]) -> Iterator[range]:
    """Ranges of documents of about `_PIECE_BYTES`."""
    start, held = 0, 0
    for i in range(len(first)):
        held += last[i] - first[i]
        if held >= _PIECE_BYTES:
            yield range(start, i + 1)
            start, held = i + 1, 0
    if start < len(first):
        yield range(start, len(first))
