"""Packed dataset: samples are whole documents, packed best-fit by `headrace prep pack`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.formats.packfile import PACK_SUFFIX, PACKING_KIND, PackFile, packing_name
from foundation.directory import Manifest, check_kind, check_sizes, read_manifest
from foundation.errors import DataError
from foundation.paths import is_store_url
from foundation.remote_directory import cached, find_manifest, read_remote_manifest
from pipeline.data.dataset import Spans, TokenDataset, check_files, find_tokens
from pipeline.data.documents import I64, DocumentBoundaries
from pipeline.data.files import MOST, SpanReader


class PackedDataset(TokenDataset):
    """Samples are the bins of a packing instead of windows. Use `PackedDataset.open`.

    Attributes:
        packing: manifest of the packing.
        packed: directory of the packing.
    """

    def __init__(self, path: Path, manifest: Manifest, *, packing: Manifest, packed: Path, **about: Any) -> None:
        """`about` is passed on to `TokenDataset`."""
        self.packing, self.packed = packing, packed
        self._packs: dict[int, PackFile] = {}
        super().__init__(path, manifest, **about)

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
    ) -> PackedDataset:
        """Opens a split and its packing; see `TokenDataset.open`.

        Raises:
            DataError: the split cannot be opened, there is no packing of this length, or it was made from other tokens.
        """
        origin = str(path)
        path, manifest, files, stat_files = find_tokens(path, manifest, files, stat_files)
        check_files(path, manifest, split=split, source=source, stat_files=stat_files)
        packed, packing = _find_packing(origin, sequence_length)
        if packing.parents["tokens"]["fingerprint"] != manifest.fingerprint:
            why = f"{origin}/{packing_name(sequence_length)} was made from other tokens than those in {origin}"
            raise DataError(f"{why}\n  try: remove it, and {_how_to_pack(origin, sequence_length)}")
        if split not in packing.details["splits"]:
            raise DataError(f"{packed} has no split '{split}'\n  try: data.packing contiguous")
        if stat_files:
            check_sizes(packed, packing)
        about: dict[str, Any] = {"split": split, "sequence_length": sequence_length, "source": source, "files": files}
        dataset = cls(path, manifest, packing=packing, packed=packed, origin=origin, **about)
        dataset.check_not_empty()
        return dataset

    @property
    def target_fraction(self) -> float:
        """Fraction of the positions that are targets with `mask_documents`."""
        targets = sum(int(shard["targets"]) for shard in self._shards())
        return targets / (self.windows * self.sequence_length)

    @property
    def summary(self) -> str:
        """Path, size and share of targets of the dataset, for messages."""
        return f"{super().summary} of packed documents, {100 * self.target_fraction:.2f} % of positions are targets"

    def spans(self, windows: npt.ArrayLike) -> Spans:
        """Locates the tokens of samples; padding at a sample's end has shard -1. See `TokenDataset.spans`."""
        shards, bins = self.locate(windows)
        parts = [self._pieces(int(s), mine, bins[mine]) for s in np.unique(shards) for mine in [_where(shards, s)]]
        window, at, shard, start, length = map(np.concatenate, zip(*parts, strict=True))
        used = np.bincount(window, weights=length, minlength=shards.size).astype(np.int64)
        short = np.flatnonzero(used <= self.sequence_length)
        none, rest = np.zeros_like(short), self.sequence_length + 1 - used[short]
        padding = (short, used[short], none - 1, none, rest)
        pieces = (window, at, shard, start, length)
        joined = [np.concatenate(pair) for pair in zip(pieces, padding, strict=True)]
        order = np.lexsort((joined[1], joined[0]))
        return Spans(*(column[order] for column in joined))

    def boundaries(self, windows: npt.ArrayLike) -> DocumentBoundaries:
        """Implements `TokenDataset.boundaries`; `used` is the length of each sample without padding."""
        spans, samples = self.spans(windows), np.size(windows)
        whole = spans.shard >= 0
        used = np.bincount(spans.window[whole], weights=spans.length[whole], minlength=samples)
        inside = whole & (spans.at > 0)
        return DocumentBoundaries(spans.window[inside], spans.at[inside], used.astype(np.int64))

    def _pieces(self, shard: int, windows: I64, bins: I64) -> tuple[I64, ...]:
        pack = self._pack(shard)
        first, counts = pack.first_piece[bins], pack.first_piece[bins + 1] - pack.first_piece[bins]
        number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        piece = np.repeat(first, counts) + number
        lengths = pack.lengths[piece].astype(np.int64)
        before = np.cumsum(lengths) - lengths
        at = before - np.repeat(before[number == 0], counts)
        return np.repeat(windows, counts), at, np.full(piece.size, shard), pack.starts[piece], lengths

    def _pack(self, shard: int) -> PackFile:
        if shard not in self._packs:
            path = self.packed / self.split / f"{self._names[shard]}{PACK_SUFFIX}"
            pack = PackFile.open(path)
            if (pack.length, pack.bins) != (self.sequence_length, self._shards()[shard]["bins"]):
                raise DataError(f"{path} does not match its manifest\n  try: remove {self.packed}, and pack again")
            while len(self._packs) >= MOST:
                self._packs.pop(next(iter(self._packs)))
            self._packs[shard] = pack
        return self._packs[shard]

    def _shards(self) -> list[dict[str, Any]]:
        entries = self.packing.details["splits"][self.split]["shards"]
        return [entries[i] for i in self.chosen]

    def _windows_of_shards(self) -> list[int]:
        return [entry["bins"] for entry in self._shards()]


def _find_packing(tokens: str, length: int) -> tuple[Path, Manifest]:
    """Finds the packing of a tokens directory; returns the packing's directory on this host and its manifest.

    Raises:
        DataError: there is no packing.
        StorageError: the store cannot be read.
    """
    name = packing_name(length)
    if not is_store_url(tokens):
        packed = Path(tokens) / name
        if packed.is_dir():
            return packed, read_manifest(packed, kind=PACKING_KIND)
    url = f"{tokens}/{name}"
    if not is_store_url(tokens) or find_manifest(url) is None:
        why = f"{tokens} is not packed for samples of {length} tokens"
        raise DataError(f"{why}\n  try: {_how_to_pack(tokens, length)}")
    found = read_remote_manifest(url)
    check_kind(url, found[1], kind=PACKING_KIND)
    return cached(url, wanted=lambda _name: True, found=found), found[1]


def _how_to_pack(tokens: str, length: int) -> str:
    if not is_store_url(tokens):
        return f"headrace prep pack {tokens} --length {length}"
    name = packing_name(length)
    return f"headrace prep pack TOKENS --length {length} on a disk, then headrace copy TOKENS/{name} {tokens}/{name}"


def _where(shards: I64, shard: np.int64) -> I64:
    return np.flatnonzero(shards == shard)
