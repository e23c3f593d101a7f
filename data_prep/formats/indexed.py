"""Memory-mapped token files with an index of their documents: Megatron's, which data_prep writes, and datatrove's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from data_prep.formats.dsfile import DS, DsFile
from data_prep.formats.sorted_search import I64
from data_prep.formats.tokenfile import TokenFile


class IndexedTokens(Protocol):
    """A memory-mapped file of token ids, with an index that locates its documents."""

    @property
    def path(self) -> Path:
        """The file that holds the ids."""

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All ids."""

    @property
    def documents(self) -> int:
        """Number of documents, D."""

    def document_starts(self, documents: npt.ArrayLike) -> I64:
        """int64 [n], position of each document's first token; for document number D, the end of the file."""

    def first_document_from(self, positions: I64) -> I64:
        """int64 [n], the first document that begins at or after each position; D where there is none."""


def open_indexed(prefix: Path, *, random_access: bool = False) -> IndexedTokens:
    """Memory-maps NAME.ds and its index, or else PREFIX.bin and PREFIX.idx.

    Args:
        prefix: path prefix of the pair; a path that ends with .ds is the file itself.
        random_access: whether to disable read-ahead, for small reads at random offsets.

    Raises:
        DataError: a file is missing or damaged, or the file and its index contradict each other.
    """
    if prefix.name.endswith(DS):
        return DsFile.open(prefix, random_access=random_access)
    return TokenFile.open(prefix, random_access=random_access)
