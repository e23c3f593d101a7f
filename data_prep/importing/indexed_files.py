"""Files with an index of their documents, which training also reads in place: datatrove's .ds, Megatron's .bin/.idx."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.formats.indexed import open_indexed
from data_prep.formats.maskfile import mask_path, open_mask
from data_prep.importing.documents import Documents, by_blocks


@dataclass(frozen=True)
class IndexedFile:
    """A .ds file, or the prefix of a Megatron-LM dataset."""

    path: Path

    @property
    def masked(self) -> bool:
        """Implements `TokenSource`."""
        return mask_path(self.path).is_file()

    def read(self) -> Iterator[Documents]:
        """Implements `TokenSource`."""
        file = open_indexed(self.path)
        ends = file.document_starts(np.arange(1, file.documents + 1))
        yield from by_blocks(file.tokens, ends, open_mask(self.path, tokens=file.tokens.size))


def open_file(path: Path) -> IndexedFile:
    """Checks that the files belong together.

    Raises:
        DataError: a file is missing or damaged, or the file and its index contradict each other.
    """
    open_indexed(path)
    return IndexedFile(path)
