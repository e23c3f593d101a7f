"""Token files that are opened when they are first looked at: ten thousand shards are not mapped at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from data_prep.tokenfile import TokenFile
from headrace.errors import DataError

MOST: Final = 1 << 14
"""Files that are open at one time, two maps each, and one for a packing: Linux allows a process 65,530 maps
(vm.max_map_count)."""


class Opened(NamedTuple):
    """A token file, its tokens, and the address of the first of them."""

    file: TokenFile
    tokens: npt.NDArray[Any]
    address: int


class OpenFiles:
    """Opens token files by prefix and keeps them; beyond `most` the one that was opened first is given up.

    What is given up is unmapped when the last array made from it has gone.

    Args:
        most: files.
        at_random: see `map_file`; whoever reads should hint before.
    """

    def __init__(self, *, most: int = MOST, at_random: bool = False) -> None:
        self._most, self._at_random = most, at_random
        self._open: dict[str, Opened] = {}

    def __len__(self) -> int:
        return len(self._open)

    def get(self, prefix: str, tokens: int) -> Opened:
        """The file, open, of so many tokens.

        Raises:
            DataError: it holds another number of them, or see `TokenFile.open`.
        """
        found = self._open.get(prefix)
        if found is None:
            file = TokenFile.open(Path(prefix), at_random=self._at_random)
            if file.tokens.size != tokens:
                why = f"{prefix} has {file.tokens.size} tokens, its manifest says {tokens}"
                raise DataError(f"{why}\n  try: make the dataset again")
            found = Opened(file, file.tokens, int(np.asarray(file.tokens).ctypes.data))
            while len(self._open) >= self._most:
                self._open.pop(next(iter(self._open)), None)
            self._open[prefix] = found
        return found
