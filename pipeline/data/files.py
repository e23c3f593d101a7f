"""Pool of memory-mapped token files and loss masks, opened on first use: ten thousand shards are not mapped at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from data_prep.formats.indexed import IndexedTokens, open_indexed
from data_prep.formats.maskfile import mask_path, open_mask
from headrace.base.errors import DataError

_Kept = TypeVar("_Kept")

MOST: Final = 15_000
"""Limit of open files, each with two memory maps, one for a loss mask and one for a packing: Linux allows a process
65,530 maps (vm.max_map_count), of which Python and its libraries take some thousand."""


class Opened(NamedTuple):
    """A token file, its tokens, and the memory address of the first one."""

    file: IndexedTokens
    tokens: npt.NDArray[Any]
    address: int


class OpenedMask(NamedTuple):
    """The loss mask of a token file, uint8 [tokens], and the memory address of its first byte."""

    loss_mask: npt.NDArray[Any]
    address: int


class OpenFiles:
    """Opens token files and loss masks by prefix and keeps them open; beyond `most` of either, the oldest is closed.

    A closed file is unmapped when the last array that refers to it is freed.

    Args:
        most: limit of open files, and of open masks.
        random_access: see `map_file`; callers should use readahead before they read.
    """

    def __init__(self, *, most: int = MOST, random_access: bool = False) -> None:
        self._most, self._random_access = most, random_access
        self._open: dict[str, Opened] = {}
        self._masks: dict[str, OpenedMask] = {}

    def __len__(self) -> int:
        return len(self._open)

    def get(self, prefix: str, tokens: int) -> Opened:
        """The open file of a prefix.

        Raises:
            DataError: it does not hold `tokens` tokens, or see `open_indexed`.
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
        """The open loss mask of a prefix.

        Raises:
            DataError: it is missing, or does not have `tokens` entries.
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

    def _keep(self, kept: dict[str, _Kept], prefix: str, value: _Kept) -> None:
        while len(kept) >= self._most:
            kept.pop(next(iter(kept)), None)
        kept[prefix] = value


def _address(array: npt.NDArray[Any]) -> int:
    return int(np.asarray(array).ctypes.data)
