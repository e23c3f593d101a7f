"""Sorted runs: map tasks' output for reduce tasks, sorted by (split, source, key): a shard is one slice of each.

    RUN/tokens.bin    token ids, concatenated, BOS and EOS included
    RUN/docs.bin      one `DOCUMENT` each
    RUN/mask.bin      the loss mask: a byte for each token, 1 if it counts in the loss; only in jobs with conversations
    RUN/checks.bin    the checksum of each document, see `run_checksums.py`; runs of older versions have none
    RUN/run.json      number of documents, their groups: [split, source, first document, end], and a checksum

and, for deduplication, the files of `dedup.document_tasks.write_dedup_tables`.

A run has as many documents as fit into `RUN_BYTES` of memory, ids and metadata together; a map task writes one or more
runs. The boundaries between runs do not change any shard.
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
from data_prep.formats.tokenfile import MAX_DOCUMENT_TOKENS, too_long
from data_prep.hashing import U64
from data_prep.task import with_checksum, without_checksum
from data_prep.tasks.run_checksums import document_checksums, slice_checksums, view_checksums
from data_prep.tokenizer.engines import Tokens
from foundation.directory import write_json
from foundation.errors import DataError

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

key: sort key within its source. start: first token in the run. rank: position in the order of the input. bytes: UTF-8
size of its text. at: position in its file. unit: number of its unit in the task. tokens: number of tokens, with BOS and
EOS. source: number of its source in the config. split: number in `SPLITS`.
"""
_DOCUMENT_BYTES = 512  # memory of a document besides ids and metadata, while it is sorted and written
_WRITE_BYTES = 4 << 20
_TOKENS, _MASK, _DOCUMENTS, _RUN, _CHECKS = "tokens.bin", "mask.bin", "docs.bin", "run.json", "checks.bin"


@dataclass(frozen=True)
class DocumentMetadata:
    """Metadata of n documents, in arrays of that length. See `DOCUMENT`.

    Attributes:
        hashes: uint64 [n, 2], 128-bit hashes of the texts, or None.
        bands: uint64 [n, bands], LSH band hashes, or None.
        signatures: uint8 [n, slots], see `dedup.verify`, or None.
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
    signatures: Array | None = None

    @property
    def nbytes(self) -> int:
        """Size of all columns."""
        return sum(column.nbytes for column in vars(self).values() if column is not None)

    def take(self, which: Array) -> DocumentMetadata:
        """Selects documents by a mask or by indices."""
        taken: dict[str, Any] = {k: None if column is None else column[which] for k, column in vars(self).items()}
        return DocumentMetadata(**taken)


@dataclass
class RunWriter:
    """Collects the documents of a map task and writes them as runs `DIRECTORY/run-000` and so on.

    Args:
        before, after: ids to put before (BOS) and after (EOS) every document.
        masked: whether tokens have a loss mask.
    """

    directory: Path
    dtype: np.dtype[Any]
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    masked: bool = False
    runs: int = 0
    _used: int = 0
    _metadata_bytes: int = 0
    _ids: Array = field(init=False)
    _mask: Array = field(init=False)
    _lengths: list[Array] = field(default_factory=list)
    _metadata: list[DocumentMetadata] = field(default_factory=list)
    _frame_learnt: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        # the operating system allocates only the pages that are written
        self._ids = np.empty(RUN_BYTES // self.dtype.itemsize, self.dtype)
        self._mask = np.empty(len(self._ids) if self.masked else 0, np.uint8)

    def add(
        self, tokens: Tokens, metadata: DocumentMetadata, *, mask: Array | None = None, end_learnt: Array | None = None
    ) -> None:
        """Adds the documents of a batch; each must have tokens.

        Args:
            mask: uint8 [n], loss mask of the ids; None if all ids, including BOS and EOS, count in the loss.
            end_learnt: bool [documents], if there is a mask: whether EOS counts in the loss; None if it never does.

        Raises:
            DataError: a document has more tokens than a token file allows.
        """
        lengths = np.diff(tokens.offsets)
        longest = int(lengths.max(initial=0)) + len(self.before) + len(self.after)
        if longest > MAX_DOCUMENT_TOKENS:
            raise too_long(longest)
        self._reserve(len(tokens.ids))
        np.copyto(self._ids[self._used : self._used + len(tokens.ids)], tokens.ids, casting="unsafe")
        if self.masked:
            self._mask[self._used : self._used + len(tokens.ids)] = 1 if mask is None else mask
            texts = np.full(len(metadata.key), mask is None)
            self._frame_learnt.append(np.stack([texts, texts if end_learnt is None else end_learnt], axis=1))
        self._used += len(tokens.ids)
        self._lengths.append(lengths)
        self._metadata.append(metadata)
        self._metadata_bytes += metadata.nbytes + _DOCUMENT_BYTES * len(metadata.key)
        if self._used * (self.dtype.itemsize + self.masked) + self._metadata_bytes >= RUN_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the collected documents as a run."""
        if not self._metadata:
            return
        run = run_path(self.directory, self.runs)
        run.mkdir()
        lengths, metadata = np.concatenate(self._lengths), _concatenate(self._metadata)
        order = np.lexsort((metadata.rank, metadata.key, metadata.source, metadata.split))
        sums = [self._write_documents(run / _TOKENS, self._ids, lengths, order, self._frames(len(order)))]
        if self.masked:
            sums.append(self._write_documents(run / _MASK, self._mask, lengths, order, self._mask_frames()))
        _write_metadata(run, lengths[order] + len(self.before) + len(self.after), metadata.take(order), sums)
        self.runs += 1
        self._used, self._metadata_bytes, self._lengths, self._metadata, self._frame_learnt = 0, 0, [], [], []

    def _reserve(self, more: int) -> None:
        if self._used + more > len(self._ids):
            self._ids = self._grown(self._ids, self._used + more)
        if self.masked and len(self._mask) < len(self._ids):
            self._mask = self._grown(self._mask, len(self._ids))

    def _grown(self, values: Array, size: int) -> Array:
        grown = np.empty(size, values.dtype)
        grown[: self._used] = values[: self._used]
        return grown

    def _frames(self, documents: int) -> list[tuple[bytes, bytes]]:
        """The bytes of BOS and EOS that frame each document."""
        frame = np.array(self.before, self.dtype).tobytes(), np.array(self.after, self.dtype).tobytes()
        return [frame] * documents

    def _mask_frames(self) -> list[tuple[bytes, bytes]]:
        """The loss mask of BOS and EOS: 1 for a text, 0 for a conversation unless its EOS is the template's own."""
        first, last = [[bytes([learnt]) * len(ids) for learnt in (0, 1)] for ids in (self.before, self.after)]
        return [(first[begin], last[end]) for begin, end in np.concatenate(self._frame_learnt).astype(int).tolist()]

    @staticmethod
    def _write_documents(
        path: Path, values: Array, lengths: Array, order: Array, frames: list[tuple[bytes, bytes]]
    ) -> U64:
        """Writes the values of each document between its two frames, in order; returns the documents' checksums."""
        data, size = values.view(np.uint8).data, values.itemsize
        ends = np.cumsum(lengths)
        first, last = ((ends - lengths)[order] * size).tolist(), (ends[order] * size).tolist()
        framed = [frames[i] for i in order.tolist()]
        sums: list[U64] = []
        with path.open("wb") as file:
            for block in _blocks(last, first):
                parts: list[Any] = []
                sizes: list[int] = []
                for i in block:
                    before, after = framed[i]
                    parts += (before, data[first[i] : last[i]], after)
                    sizes.append(len(before) + last[i] - first[i] + len(after))
                joined = b"".join(parts)
                sums.append(slice_checksums(joined, np.array(sizes, np.int64)))
                file.write(joined)
        return np.concatenate(sums)


class RunStream:
    """Writes a run of any size from documents that are added in the run's order."""

    def __init__(self, run: Path, *, masked: bool) -> None:
        """Makes the directory `run`."""
        run.mkdir()
        self._run, self._tokens = run, 0
        self._groups: list[list[int]] = []
        self._documents = 0
        names = [_TOKENS, _DOCUMENTS, _CHECKS, *([_MASK] if masked else [])]
        self._files = {name: (run / name).open("wb") for name in names}

    def add(self, documents: Array, ids: Sequence[memoryview], mask: Sequence[memoryview]) -> None:
        """Adds documents of one split and source.

        Args:
            documents: `DOCUMENT` [n].
            ids, mask: bytes of each document's tokens and loss mask; `mask` is empty in jobs without one.
        """
        if not len(documents):
            return
        group = [int(documents["split"][0]), int(documents["source"][0])]
        if not self._groups or self._groups[-1][:2] != group:
            self._groups.append([*group, self._documents, self._documents])
        written, ends = documents.copy(), np.cumsum(documents["tokens"], dtype=np.int64)
        written["start"] = self._tokens + ends - documents["tokens"]
        self._tokens += int(ends[-1])
        self._documents += len(documents)
        self._groups[-1][3] = self._documents
        self._files[_DOCUMENTS].write(written.view(np.uint8).data)
        sums: list[U64] = []
        for name, views in ((_TOKENS, ids), (_MASK, mask)):
            for view in views:
                self._files[name].write(view)
            if views:
                sums.append(view_checksums(views))
        self._files[_CHECKS].write(document_checksums(written, sums).data)

    def __enter__(self) -> RunStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        for file in self._files.values():
            file.close()
        if kind is None:
            summary = {"documents": self._documents, "groups": self._groups, "checks": True}
            write_json(self._run / _RUN, with_checksum(summary))


@dataclass(frozen=True)
class SortedRun:
    """An open run, memory-mapped.

    Attributes:
        documents: `DOCUMENT` [n].
        groups: {(split, source): (first, end)}.
        checks: whether its documents have checksums.
    """

    path: Path
    documents: Array
    groups: dict[tuple[int, int], tuple[int, int]]
    checks: bool

    @classmethod
    def open(cls, path: Path, *, whole: bool = False) -> SortedRun:
        """Maps a run.

        Args:
            path: directory of the run.
            whole: whether all documents will be read, rather than some.

        Raises:
            DataError: the run is incomplete, though its task has finished.
        """
        try:
            summary = without_checksum(json.loads((path / _RUN).read_text()))
            documents = map_file(path / _DOCUMENTS, random_access=not whole).view(DOCUMENT)
            if len(documents) != (expected := summary["documents"]):
                raise ValueError(f"{_DOCUMENTS} has {len(documents)} documents, and {expected} were written")
            groups = {(split, source): (first, end) for split, source, first, end in summary["groups"]}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise damaged_run(path, str(error)) from None
        return cls(path, documents, groups, bool(summary.get("checks")))

    def find_range(self, group: tuple[int, int], low: int, high: int) -> tuple[int, int]:
        """Documents [first, end) of a group with keys in [low, high). Reads a few pages, however large the run is."""
        if group not in self.groups:
            return 0, 0
        first, end = self.groups[group]
        keys = self.documents["key"]  # np.searchsorted would read all keys: they are not contiguous
        start, stop = (bisect_left(keys, bound, first, end) if bound < 1 << 64 else end for bound in (low, high))
        return start, stop

    def read_tokens(self, documents: Array, into: Array) -> None:
        """Reads the token ids of consecutive documents."""
        self._read(_TOKENS, documents, into)

    def read_mask(self, documents: Array, into: Array) -> None:
        """Reads the loss mask of consecutive documents, uint8."""
        self._read(_MASK, documents, into)

    def _read(self, name: str, documents: Array, into: Array) -> None:
        path, left = self.path / name, into.view(np.uint8).data
        with path.open("rb", buffering=0) as file:
            file.seek(int(documents["start"][0]) * into.itemsize)
            while left and (count := file.readinto(left)):
                left = left[count:]
        if left:
            raise damaged_run(self.path, f"{name} ends early")

    def verify(self, documents: Array, first: int, ids: Array, mask: Array) -> None:
        """Compares consecutive documents, as read, with their stored checksums.

        Args:
            documents: `DOCUMENT` [n], as stored.
            first: number of the first of these documents in the run.
            ids, mask: token ids and loss mask of these documents as read; the mask is empty in jobs without one.

        Raises:
            DataError: a document differs from the one that its task wrote.
        """
        if not self.checks:
            return
        expected = np.empty(len(documents), np.uint64)
        try:
            with (self.path / _CHECKS).open("rb", buffering=0) as file:
                file.seek(first * expected.itemsize)
                file.readinto(expected.view(np.uint8).data)
        except OSError as error:
            raise damaged_run(self.path, str(error)) from None
        values = [ids, mask] if len(mask) else [ids]
        sizes = documents["tokens"].astype(np.int64)
        sums = [slice_checksums(v.view(np.uint8).data, sizes * v.itemsize) for v in values]
        wrong = np.flatnonzero(document_checksums(documents, sums) != expected)
        if len(wrong):
            why = f"document {first + int(wrong[0])} differs from its checksum ({len(wrong)} of {len(documents)} do)"
            raise damaged_run(self.path, why)


def damaged_run(run: Path, why: str) -> DataError:
    """The error for a run whose files differ from the files its task wrote."""
    remedy = f"rm -r {run.parent} and run again: only its task is repeated. Check the disk if this happens twice"
    return DataError(f"{run} is damaged: {why}\n  try: {remedy}")


@dataclass(frozen=True)
class SortedRunPaths(Sequence[Path]):
    """The paths of the runs of consecutive map tasks, as a sequence that pickles small: every later task contains one.

    Args:
        directories: the parent of the tasks' directories `00000` and on.
        counts: number of runs of each task, from task `first` on.
        skip: number of leading runs of the first task to leave out.
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
        task, run = self._locate(i)
        return run_path(task_directory(self.directories, self.first + task), run)

    def _locate(self, i: int) -> tuple[int, int]:
        """The index in `counts` of the task with run number `i`, and the run's number in that task."""
        task = bisect_right(self._ends, i + self.skip)
        return task, i + self.skip - self._ends[task] + self.counts[task]

    def _between(self, start: int, end: int) -> SortedRunPaths:
        if start == end:
            return SortedRunPaths(self.directories, ())
        (task, run), (last, last_run) = self._locate(start), self._locate(end - 1)
        return SortedRunPaths(self.directories, (*self.counts[task:last], last_run + 1), self.first + task, run)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_ends"}


def task_directory(directories: Path, task: int) -> Path:
    """The result directory of task number `task`."""
    return directories / f"{task:05d}"


def run_path(directory: Path, run: int) -> Path:
    """The directory of run number `run` of a map task."""
    return directory / f"run-{run:03d}"


def list_runs(directory: Path) -> list[Path]:
    """The runs of a finished map task, in order."""
    return sorted(directory.glob("run-*"))


def _write_metadata(run: Path, tokens: Array, metadata: DocumentMetadata, sums: Sequence[U64]) -> None:
    documents = np.zeros(len(tokens), DOCUMENT)
    documents["tokens"], documents["start"][1:] = tokens, np.cumsum(tokens)[:-1]
    for name in ("key", "rank", "bytes", "source", "split", "at", "unit"):
        documents[name] = getattr(metadata, name)
    with (run / _DOCUMENTS).open("wb") as file:  # `tofile`'s error does not name a full disk
        file.write(documents.view(np.uint8).data)
    with (run / _CHECKS).open("wb") as file:
        file.write(document_checksums(documents, sums).data)
    if metadata.hashes is not None or metadata.bands is not None:
        write_dedup_tables(
            run, rank=metadata.rank, hashes=metadata.hashes, bands=metadata.bands, signatures=metadata.signatures
        )
    summary = {"documents": len(documents), "groups": _groups(documents), "checks": True}
    write_json(run / _RUN, with_checksum(summary))


def _groups(documents: Array) -> list[list[int]]:
    which = documents["split"].astype(np.int64) << 16 | documents["source"]
    cuts = [0, *(np.flatnonzero(np.diff(which)) + 1).tolist(), len(which)]
    return [[int(which[a]) >> 16, int(which[a]) & 0xFFFF, a, b] for a, b in pairwise(cuts)]


def _concatenate(parts: list[DocumentMetadata]) -> DocumentMetadata:
    def joined(name: str) -> Any:
        columns = [getattr(part, name) for part in parts]
        return None if columns[0] is None else np.concatenate(columns)

    return DocumentMetadata(**{name: joined(name) for name in vars(parts[0])})


def _blocks(last: list[int], first: list[int]) -> Iterator[range]:
    """Yields ranges of documents of about `_WRITE_BYTES`."""
    start, size = 0, 0
    for i in range(len(first)):
        size += last[i] - first[i]
        if size >= _WRITE_BYTES:
            yield range(start, i + 1)
            start, size = i + 1, 0
    if start < len(first):
        yield range(start, len(first))
