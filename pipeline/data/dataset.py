"""One split of a tokens directory as windows of T + 1 tokens, read from memory-mapped files.

Window w of a shard is its tokens [w T, w T + T]; neighbours share the one token that is the last target of the first
and the first input of the second. A window never crosses shards, so up to T tokens at the end of each shard are not
used. Opening costs O(shards); nothing is indexed and nothing is held per sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.tokenfile import TokenFile, shard_prefix
from headrace.directory import Manifest, check_sizes, read_manifest
from headrace.errors import DataError
from pipeline.data.documents import Borders, find_borders, join


class TokenDataset:
    """Windows of one split. Use `TokenDataset.open`.

    Attributes:
        path: the tokens directory.
        split: its split, e.g. train.
        sequence_length: T, tokens per sample.
        manifest: the directory's manifest.
        tokens: tokens in the split.
        bytes: UTF-8 bytes of the split's text.
        files: its shards, open.
    """

    def __init__(self, path: Path, manifest: Manifest, *, split: str, sequence_length: int) -> None:
        self.path, self.manifest, self.split, self.sequence_length = path, manifest, split, sequence_length
        details = manifest.details["splits"][split]
        self.tokens: int = details["tokens"]
        self.bytes: int = details["bytes"]
        self.files = [TokenFile.open(shard_prefix(path, split, i)) for i in range(len(details["shards"]))]
        per_shard = [max(0, (file.tokens.size - 1) // sequence_length) for file in self.files]
        self._first_window = np.cumsum([0, *per_shard])

    @classmethod
    def open(cls, path: str | Path, *, split: str, sequence_length: int) -> TokenDataset:
        """Opens a split after comparing every file's size with the manifest.

        Raises:
            DataError: no such directory or split, a missing or truncated file, or no whole window.
        """
        path = Path(path)
        manifest = read_manifest(path, kind="tokens")
        splits = manifest.details["splits"]
        if split not in splits:
            raise DataError(f"{path} has no split '{split}'; it has {', '.join(splits)}")
        check_sizes(path, manifest)
        dataset = cls(path, manifest, split=split, sequence_length=sequence_length)
        if dataset.windows < 1:
            raise DataError(
                f"{path}/{split} has {dataset.tokens} tokens: not one sample of {sequence_length} + 1 fits a shard\n"
                f"  try: a shorter data.sequence_length, or more text"
            )
        return dataset

    @property
    def windows(self) -> int:
        """Number of windows."""
        return int(self._first_window[-1])

    def read(self, windows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Gathers windows.

        Args:
            windows: int64 [n], each in 0..self.windows-1.

        Returns:
            int64 [n, T + 1]; inputs are [:, :-1], targets [:, 1:].
        """
        shards, starts = self.locate(windows)
        rows = np.empty((starts.size, self.sequence_length + 1), dtype=np.int64)
        for row, shard, start in zip(rows, shards, starts, strict=True):
            row[:] = self.files[shard].tokens[start : start + self.sequence_length + 1]
        return rows

    def borders(self, windows: npt.ArrayLike) -> Borders:
        """Where documents begin within windows, from the index alone.

        Args:
            windows: int64 [n], each in 0..self.windows-1.
        """
        shards, starts = self.locate(windows)
        parts = []
        for shard in np.unique(shards):
            mine = np.flatnonzero(shards == shard)
            parts.append((mine, find_borders(self.files[shard], starts[mine], length=self.sequence_length)))
        return join(parts)

    def locate(self, windows: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Shard and first token of every window.

        Args:
            windows: int64 [n].

        Returns:
            int64 [n] each.
        """
        wanted = np.asarray(windows, dtype=np.int64)
        shards = np.searchsorted(self._first_window, wanted, side="right") - 1
        return shards, (wanted - self._first_window[shards]) * self.sequence_length


def tokenizer_details(manifest: Manifest) -> dict[str, Any]:
    """What a tokens directory says of its tokenizer: fingerprint, vocab_size, eos_id, ..."""
    details: dict[str, Any] = manifest.details["tokenizer"]
    return details
