"""Memory-mapped dataset: one split of a tokens directory as windows of T + 1 tokens.

Window w of a shard is its tokens [w T, w T + T]. Neighboring windows share one token: the last target of the first and
the first input of the second. A window never crosses shards, so up to T tokens at the end of each shard are not used.
Opening costs O(shards) and maps nothing; no memory is used per sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.formats.indexed import IndexedTokens
from data_prep.formats.maskfile import MASK
from foundation.directory import Manifest, check_sizes, read_manifest
from foundation.errors import DataError
from foundation.paths import is_store_url
from pipeline.data.documents import I64, DocumentBoundaries, find_boundaries, join
from pipeline.data.files import OpenFiles, ShardSpan, SpanReader
from pipeline.data.remote_shards import RemoteShards


class UnknownIdError(DataError):
    """A token whose id is outside of the vocabulary; `row` is its row in the array that was read."""

    row = 0

    def of_sample(self, number: int) -> DataError:
        """Returns the error with the number of the sample in a run."""
        return DataError(f"sample {number}: {self}")


@dataclass(frozen=True)
class Spans:
    """Contiguous spans of shards that store the tokens of windows, in order, int64 [n] each.

    Attributes:
        window: index of the window among those requested, from 0.
        at: position of the span's first token in its window.
        shard: number of the shard; -1 for padding.
        start: the first token's position in the shard.
        length: number of tokens.
    """

    window: I64
    at: I64
    shard: I64
    start: I64
    length: I64


class TokenDataset:
    """Windows of one split, or of one source in it. Use `TokenDataset.open`.

    Attributes:
        path: the tokens directory, or the dataset of another tool that is read in place.
        split: name of the split, e.g. train.
        source: name of the source; None for all sources.
        sequence_length: T, tokens per sample.
        manifest: the directory's manifest.
        tokens: tokens in the shards.
        bytes: UTF-8 bytes of the tokens' text; 0 if unknown.
        tokenizer: Hugging Face folder of the dataset's tokenizer.
        masked: whether the dataset has a loss mask, as datasets of conversations do.
        in_place: whether the dataset was made by another tool and has no manifest.
        origin: the path, or the URL of a directory in an object store; then `path` has all files but the shards.
        files: reader of the shards.
    """

    def __init__(  # noqa: PLR0913  all but four have defaults
        self,
        path: Path,
        manifest: Manifest,
        *,
        split: str,
        sequence_length: int,
        source: str | None = None,
        folder: Path | None = None,
        tokenizer: Path | None = None,
        files: SpanReader | None = None,
        origin: str | None = None,
    ) -> None:
        self.files = OpenFiles() if files is None else files
        self.origin = origin or str(path)
        self.path, self.manifest, self.split, self.source = path, manifest, split, source
        self.sequence_length = sequence_length
        self.tokenizer = tokenizer or path / "tokenizer"
        self.in_place = folder is not None
        entries = manifest.details["splits"][split]["shards"]
        self.chosen = [i for i, entry in enumerate(entries) if source is None or entry.get("source") == source]
        before = np.cumsum([0, *(entry["documents"] for entry in entries)])
        shards = [entries[i] for i in self.chosen]
        self.first_document: I64 = before[:-1][self.chosen]
        self.tokens = sum(entry["tokens"] for entry in shards)
        self.bytes = sum(entry["bytes"] for entry in shards)
        self._sizes = [entry["tokens"] for entry in shards]
        self._names = [entry["name"] for entry in shards]
        self.masked = manifest.details["splits"][split].get("masked", False) or any(
            f"{split}/{name}{MASK}" in manifest.files for name in self._names
        )
        self._folder = f"{folder or f'{self.origin}/{split}'}/"
        pad = padding_id(manifest)
        self._vocabulary = int(tokenizer_details(manifest)["vocab_size"])
        self._padding = np.full(sequence_length + 1, pad, dtype=np.uint16 if pad < 1 << 16 else np.int32)
        self._first_window = np.cumsum([0, *self._windows_of_shards()])

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        split: str,
        sequence_length: int,
        source: str | None = None,
        manifest: Manifest | None = None,
        files: SpanReader | None = None,
        stat_files: bool = True,
    ) -> TokenDataset:
        """Opens a split, and compares the sizes of its files with the manifest.

        Args:
            path: the tokens directory, or its URL; with a URL the shards are read in place.
            split, sequence_length, source: name of the split, T in tokens per sample, name of the source (None: all).
            manifest: manifest of a directory on a disk, if it is already read; None reads it.
            files: pool of open files, shared between datasets; `RemoteShards` for URLs.
            stat_files: whether to compare the sizes of the files now; otherwise each is compared at its first read.

        Raises:
            DataError: directory, split or source do not exist, a file is missing or truncated, or no window fits.
        """
        origin = str(path)
        path, manifest, files, stat_files = find_tokens(path, manifest, files, stat_files)
        check_files(path, manifest, split=split, source=source, stat_files=stat_files)
        about: dict[str, Any] = {"split": split, "sequence_length": sequence_length, "source": source, "files": files}
        dataset = cls(path, manifest, origin=origin, **about)
        dataset.check_not_empty()
        return dataset

    @property
    def windows(self) -> int:
        """Number of windows."""
        return int(self._first_window[-1])

    def check_not_empty(self) -> None:
        """Raises DataError if there is less than one window."""
        if self.windows < 1:
            raise DataError(
                f"{self.label} has {self.tokens} tokens: no shard holds a sample of {self.sequence_length} + 1 tokens\n"
                f"  try: a shorter data.sequence_length, or more text"
            )

    @property
    def label(self) -> str:
        """Name of the dataset in messages."""
        if self.in_place:
            return self.origin  # it has no splits
        return f"{self.origin}/{self.split}" + (f" ({self.source})" if self.source else "")

    @property
    def summary(self) -> str:
        """Path and size of the dataset, for messages."""
        which = f" ({self.source})" if self.source else ""
        made = f" (of the tokenizer {named})" if (named := self.manifest.details.get("made_with")) else ""
        return f"{self.origin}{which}: {self.tokens:,} tokens, {self.windows:,} samples{made}"

    def read_from(self, copy: Path) -> None:
        """Reads shards from now on from a copy of the tokens directory on a disk; see `staging`."""
        self._folder = f"{copy / self.split}/"
        if isinstance(self.files, RemoteShards):
            self.files = OpenFiles(random_access=True)

    def read(self, windows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Reads windows.

        Args:
            windows: int64 [n], each in 0..self.windows-1.

        Returns:
            int64 [n, T + 1]; inputs are [:, :-1], targets [:, 1:].
        """
        return self.rows(windows).astype(np.int64)

    def rows(self, windows: npt.ArrayLike) -> npt.NDArray[Any]:
        """Reads windows as `read` does, but in the dtype of the files, [n, T + 1]: uint16 is a quarter of int64.

        Raises:
            UnknownIdError: a token whose id the tokenizer does not have.
        """
        spans = self.spans(windows)
        rows = self._rows_of(spans, self.files.read(self._shard_spans(spans)), self._padding)
        # viewed as unsigned, negative ids are too large as well: one pass checks both, in a tenth of the copy's time
        if rows.size and rows.view(f"u{rows.itemsize}").max() >= self._vocabulary:
            raise self._unknown_id(np.asarray(windows), rows)
        return rows

    def _unknown_id(self, windows: I64, rows: npt.NDArray[Any]) -> UnknownIdError:
        row, at = (int(each) for each in np.argwhere((rows < 0) | (rows >= self._vocabulary))[0])
        error = UnknownIdError(
            f"{self.label}: token {at} of window {windows[row]} is the id {rows[row, at]}, and its tokenizer has"
            f" {self._vocabulary} ids\n  try: the tokenizer that made it, or make it again from its text"
        )
        error.row = row
        return error

    def loss_mask(self, windows: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Loss mask of windows: bool [n, T + 1], true where a token may be a target."""
        if not self.masked:
            return np.ones((np.size(windows), self.sequence_length + 1), dtype=np.bool_)
        spans, none = self.spans(windows), np.zeros(self.sequence_length + 1, dtype=np.uint8)
        found = self._rows_of(spans, self.files.read_masks(self._shard_spans(spans)), none)
        return found.astype(np.bool_)

    def spans(self, windows: npt.ArrayLike) -> Spans:
        """Locates the tokens of windows in the shards.

        Args:
            windows: int64 [n], each in 0..self.windows-1.
        """
        shards, numbers = self.locate(windows)
        whole = np.full(shards.size, self.sequence_length + 1)
        return Spans(np.arange(shards.size), np.zeros_like(shards), shards, numbers * self.sequence_length, whole)

    def read_ahead(self, windows: npt.ArrayLike) -> None:
        """Starts reading windows from disk or network in the background (readahead)."""
        self.files.read_ahead(self._shard_spans(self.spans(windows)))

    def read_ahead_masks(self, windows: npt.ArrayLike) -> None:
        """Starts reading the loss masks of windows in the background."""
        if self.masked:
            self.files.read_ahead_masks(self._shard_spans(self.spans(windows)))

    def boundaries(self, windows: npt.ArrayLike) -> DocumentBoundaries:
        """Returns the document boundaries within windows, from the index alone; no token is read.

        Args:
            windows: int64 [n], each in 0..self.windows-1.
        """
        shards, numbers = self.locate(windows)
        starts, parts = numbers * self.sequence_length, []
        for shard in np.unique(shards):
            mine = np.flatnonzero(shards == shard)
            parts.append((mine, find_boundaries(self.file(int(shard)), starts[mine], length=self.sequence_length)))
        return join(parts)

    def locate(self, windows: npt.ArrayLike) -> tuple[I64, I64]:
        """Returns the shard of every window, and the window's index within the shard.

        Args:
            windows: int64 [n].

        Returns:
            int64 [n] each.
        """
        wanted = np.asarray(windows, dtype=np.int64)
        shards = np.searchsorted(self._first_window, wanted, side="right") - 1
        return shards, wanted - self._first_window[shards]

    def sources_of(self, windows: npt.ArrayLike) -> list[str | None]:
        """Returns the name of the source of each window [n]; None where the manifest names none."""
        entries = self.manifest.details["splits"][self.split]["shards"]
        names = [entries[i].get("source") for i in self.chosen]
        return [names[shard] for shard in self.locate(windows)[0]]

    def file(self, shard: int) -> IndexedTokens:
        """Returns the open token file of a shard.

        Raises:
            DataError: the file is damaged, or does not match the manifest.
        """
        return self.files.file(self._folder + self._names[shard], self._sizes[shard])

    def shard_spans(self, windows: npt.ArrayLike) -> list[ShardSpan]:
        """Returns the spans of shards that hold the tokens of windows."""
        return self._shard_spans(self.spans(windows))

    def prefixes(self, windows: npt.ArrayLike | None = None) -> list[str]:
        """Returns the shards of windows, each once; all shards when `windows` is None."""
        shards = range(len(self._names)) if windows is None else np.unique(self.locate(windows)[0]).tolist()
        return [self._folder + self._names[shard] for shard in shards]

    def _shard_spans(self, spans: Spans) -> list[ShardSpan]:
        """Drops the spans of padding."""
        columns = zip(*_lists(spans.shard, spans.start, spans.length), strict=True)
        return [
            ShardSpan(self._folder + self._names[shard], self._sizes[shard], start, length)
            for shard, start, length in columns
            if shard >= 0
        ]

    def _rows_of(self, spans: Spans, read: Iterable[npt.NDArray[Any]], padding: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Joins the arrays that were read for `_shard_spans`, with padding between them: [n, T + 1]."""
        found = iter(read)
        columns = zip(*_lists(spans.shard, spans.start, spans.length), strict=True)
        parts = [padding[start : start + length] if shard < 0 else next(found) for shard, start, length in columns]
        return np.concatenate(parts or [padding[:0]]).reshape(-1, self.sequence_length + 1)

    def _windows_of_shards(self) -> list[int]:
        return [max(0, (size - 1) // self.sequence_length) for size in self._sizes]


def find_tokens(
    path: str | Path, manifest: Manifest | None, files: SpanReader | None, stat_files: bool
) -> tuple[Path, Manifest, SpanReader | None, bool]:
    """Finds the directory, manifest and files that `TokenDataset.open` opens.

    Returns:
        The directory on this host, its manifest, the reader of its files or None, and whether to compare their sizes.
    """
    if is_store_url(str(path)):
        remote = files if isinstance(files, RemoteShards) else RemoteShards()
        return *remote.open(str(path), stat_files=stat_files), remote, False
    return Path(path), manifest or read_manifest(path, kind="tokens"), files, stat_files


def check_files(path: Path, manifest: Manifest, *, split: str, source: str | None, stat_files: bool = True) -> None:
    """Compares the sizes of the files of a split, or of one source in it, with the manifest.

    Args:
        path, manifest: the tokens directory and its manifest.
        split, source: names of the split and of the source; a source of None means all.
        stat_files: whether to compare the sizes; without it, only the names are checked.

    Raises:
        DataError: the split or source does not exist, or a file is missing or has another size.
    """
    splits = manifest.details["splits"]
    if split not in splits:
        raise DataError(f"{path} has no split '{split}'; it has {', '.join(splits)}\n  try: {_remedy(split)}")
    shards = splits[split]["shards"]
    labels = sorted({str(shard["source"]) for shard in shards if "source" in shard})
    if source is not None and source not in labels:
        has = f"; it has {', '.join(labels)}" if labels else ": its manifest names none"
        raise DataError(
            f"{path}/{split} has no source '{source}'{has}\n  try: one of these, or leave 'source' out for all"
        )
    if not stat_files:
        return
    others = {f"{split}/{shard['name']}" for shard in shards if source is not None and shard.get("source") != source}
    files = {
        name: entry
        for name, entry in manifest.files.items()
        if name.partition("/")[0] not in splits.keys() - {split} and name.rpartition(".")[0] not in others
    }
    check_sizes(path, replace(manifest, files=files))


def _remedy(split: str) -> str:
    if split == "heldout":
        return "a directory made with heldout_fraction above 0, or another split"
    return "another directory or split"


def tokenizer_details(manifest: Manifest) -> dict[str, Any]:
    """Details of the tokenizer in a tokens directory's manifest: fingerprint, vocab_size, eos_id, ..."""
    details: dict[str, Any] = manifest.details["tokenizer"]
    return details


def padding_id(manifest: Manifest) -> int:
    """Returns the id of padding tokens: pad_id, else eos_id, else 0. No loss depends on it, since padding is masked."""
    details = tokenizer_details(manifest)
    given = (details.get(key) for key in ("pad_id", "eos_id"))
    return next((int(number) for number in given if number is not None), 0)


def choose_windows(available: int, wanted: int | None) -> I64:
    """Returns int64 indices of the windows to evaluate: all, or `wanted`, evenly spaced so that no source dominates.

    A shard holds documents of one source, so the first windows of a split would all be of the first source.
    """
    count = available if wanted is None else min(wanted, available)
    return np.arange(count, dtype=np.int64) * available // count


def _lists(*arrays: I64) -> list[list[int]]:
    return [array.tolist() for array in arrays]
