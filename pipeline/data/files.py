"""Token files and their masks, opened when they are first looked at: ten thousand shards are not mapped at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from data_prep.formats.maskfile import MASK, open_mask
from data_prep.formats.tokenfile import TokenFile
from headrace.base.errors import DataError

_Kept = TypeVar("_Kept")

MOST: Final = 15_000
"""Files that are open at one time, two maps each, and one for a mask and one for a packing: Linux allows a process
65,530 maps (vm.max_map_count), of which Python and its libraries take some thousand."""


class Opened(NamedTuple):
    """A token file, its tokens, and the address of the first of them."""

    file: TokenFile
    tokens: npt.NDArray[Any]
    address: int


class OpenedMask(NamedTuple):
    """The mask of a token file, uint8 [tokens], and the address of its first byte."""

    learnt: npt.NDArray[Any]
    address: int


class OpenFiles:
    """Opens token files and masks by prefix and keeps them; beyond `most` of either the first opened is given up.

    What is given up is unmapped when the last array made from it has gone.

    Args:
        most: files, and as many masks.
        random_access: see `map_file`; whoever reads should hint before.
    """

    def __init__(self, *, most: int = MOST, random_access: bool = False) -> None:
        self._most, self._at_random = most, random_access
        self._open: dict[str, Opened] = {}
        self._masks: dict[str, OpenedMask] = {}

    def __len__(self) -> int:
        return len(self._open)

    def get(self, prefix: str, tokens: int) -> Opened:
        """The file, open, of so many tokens.

        Raises:
            DataError: it holds another number of them, or see `TokenFile.open`.
        """
        found = self._open.get(prefix)
        if found is None:
            file = TokenFile.open(Path(prefix), random_access=self._at_random)
            if file.tokens.size != tokens:
                why = f"{prefix} has {file.tokens.size} tokens, its manifest says {tokens}"
                raise DataError(f"{why}\n  try: make the dataset again")
            found = Opened(file, file.tokens, _address(file.tokens))
            self._keep(self._open, prefix, found)
        return found

    def mask(self, prefix: str, tokens: int) -> OpenedMask:
        """The mask of a file of so many tokens.

        Raises:
            DataError: it is not there, or of another length.
        """
        found = self._masks.get(prefix)
        if found is None:
            learnt = open_mask(Path(prefix), tokens=tokens, random_access=self._at_random)
            if learnt is None:
                remedy = "make the tokens again; the masks lie beside the shards"
                raise DataError(f"{prefix}{MASK} is missing\n  try: {remedy}")
            found = OpenedMask(learnt, _address(learnt))
            self._keep(self._masks, prefix, found)
        return found

    def _keep(self, kept: dict[str, _Kept], prefix: str, value: _Kept) -> None:
        while len(kept) >= self._most:
            kept.pop(next(iter(kept)), None)
        kept[prefix] = value


def _address(array: npt.NDArray[Any]) -> int:
    return int(np.asarray(array).ctypes.data)
