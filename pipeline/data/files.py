"""Pool of memory-mapped token files and loss masks, opened on first use, with a limit on the files open at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from data_prep.formats.indexed import IndexedTokens, open_indexed
from data_prep.formats.maskfile import mask_path, open_mask
from data_prep.formats.memory_map import fault_in, will_need
from foundation.errors import DataError

_Kept = TypeVar("_Kept")

MOST: Final = 15_000
"""Limit of open files. Each has two memory maps, plus one for a loss mask and one for a packing. Linux allows a process
65,530 maps (vm.max_map_count); Python and its libraries take some thousand."""


class Opened(NamedTuple):
    """A token file, its tokens, and the memory address of the first one."""

    file: IndexedTokens
    tokens: npt.NDArray[Any]
    address: int


class OpenedMask(NamedTuple):
    """The loss mask of a token file, uint8 [tokens], and the memory address of its first byte."""

    loss_mask: npt.NDArray[Any]
    address: int


class ShardSpan(NamedTuple):
    """A span of `length` tokens from `start` on, in the shard at `prefix`, which has `tokens` tokens."""

    prefix: str
    tokens: int
    start: int
    length: int


class SpanReader(Protocol):
    """Reads tokens and loss masks of shards; opens a shard on first use."""

    def read(self, spans: Sequence[ShardSpan]) -> list[npt.NDArray[Any]]:
        """Returns the tokens of spans, [length] each.

        Raises:
            DataError: a shard cannot be read, or differs from its manifest.
        """
        ...

    def read_masks(self, spans: Sequence[ShardSpan]) -> list[npt.NDArray[Any]]:
        """Returns the loss masks of spans, uint8 [length] each."""
        ...

    def read_ahead(self, spans: Sequence[ShardSpan]) -> None:
        """Announces the spans that will be read next, in order; returns without waiting."""
        ...

    def read_ahead_masks(self, spans: Sequence[ShardSpan]) -> None:
        """Reads loss masks ahead, as `read_ahead` does tokens."""
        ...

    def file(self, prefix: str, tokens: int) -> IndexedTokens:
        """Opens a shard with its document index; the tokens need not be on this host."""
        ...


class OpenFiles:
    """Opens token files and loss masks by prefix and keeps them open; closes the oldest beyond `most` of either kind.

    A closed file is unmapped when the last array that refers to it is freed.

    Args:
        most: limit of open files, and of open masks.
        random_access: whether to disable the kernel's readahead (MADV_RANDOM); callers should then use `read_ahead`.
    """

    def __init__(self, *, most: int = MOST, random_access: bool = False) -> None:
        self._most, self._random_access = most, random_access
        self._open: dict[str, Opened] = {}
        self._masks: dict[str, OpenedMask] = {}

    def __len__(self) -> int:
        return len(self._open)

    def get(self, prefix: str, tokens: int) -> Opened:
        """Returns the open file of a prefix.

        Raises:
            DataError: the file does not hold `tokens` tokens, or is missing or damaged.
        """
        found = self._open.get(prefix)
        if found is None:
            file = open_indexed(Path(prefix), random_access=self._random_access)
            if file.tokens.size != tokens:
                why = f"{prefix} has {file.tokens.size} tokens, its manifest lists {tokens}"
                raise DataError(f"{why}\n  try: make the dataset again")
            found = Opened(file, file.tokens, _address(file.tokens))
            self._keep(self._open, prefix, found)
        return found

    def mask(self, prefix: str, tokens: int) -> OpenedMask:
        """Returns the open loss mask of a prefix.

        Raises:
            DataError: the mask is missing, or does not have `tokens` entries.
        """
        found = self._masks.get(prefix)
        if found is None:
            loss_mask = open_mask(Path(prefix), tokens=tokens, random_access=self._random_access)
            if loss_mask is None:
                remedy = "make the tokens again; masks are written beside the shards"
                raise DataError(f"{mask_path(Path(prefix))} is missing\n  try: {remedy}")
            found = OpenedMask(loss_mask, _address(loss_mask))
            self._keep(self._masks, prefix, found)
        return found

    def read(self, spans: Sequence[ShardSpan]) -> list[npt.NDArray[Any]]:
        """Reads the tokens of spans; see `SpanReader.read`."""
        fault_in(self._parts(spans, self.get))
        return [self.get(each.prefix, each.tokens).tokens[each.start : each.start + each.length] for each in spans]

    def read_masks(self, spans: Sequence[ShardSpan]) -> list[npt.NDArray[Any]]:
        """Reads the loss masks of spans; see `SpanReader.read_masks`."""
        fault_in(self._parts(spans, self.mask))
        return [self.mask(each.prefix, each.tokens).loss_mask[each.start : each.start + each.length] for each in spans]

    def read_ahead(self, spans: Sequence[ShardSpan]) -> None:
        """Asks the kernel to read spans from disk or network in the background (madvise WILLNEED)."""
        for address, size in self._parts(spans, self.get):
            will_need(address, size)

    def read_ahead_masks(self, spans: Sequence[ShardSpan]) -> None:
        """Reads loss masks ahead, as `read_ahead` does tokens."""
        for address, size in self._parts(spans, self.mask):
            will_need(address, size)

    def file(self, prefix: str, tokens: int) -> IndexedTokens:
        """Opens a shard; see `SpanReader.file`."""
        return self.get(prefix, tokens).file

    @staticmethod
    def _parts(
        spans: Sequence[ShardSpan], open_shard: Callable[[str, int], Opened | OpenedMask]
    ) -> Iterator[tuple[int, int]]:
        """Yields address and bytes of each span, which stays mapped until the next one is requested."""
        for each in spans:
            opened = open_shard(each.prefix, each.tokens)
            width = opened.tokens.itemsize if isinstance(opened, Opened) else 1
            yield opened.address + each.start * width, each.length * width

    def _keep(self, kept: dict[str, _Kept], prefix: str, value: _Kept) -> None:
        while len(kept) >= self._most:
            kept.pop(next(iter(kept)), None)
        kept[prefix] = value


def _address(array: npt.NDArray[Any]) -> int:
    return int(np.asarray(array).ctypes.data)
