"""Code that the readers of other tools' tokens share: documents, read file by file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
I64 = npt.NDArray[np.int64]

BLOCK_TOKENS = 1 << 20
"""Approximate number of tokens read at a time."""


class Documents(NamedTuple):
    """Whole documents, or rows.

    Attributes:
        tokens: [sum of lengths], ids of any integer dtype.
        lengths: int64 [documents].
        mask: uint8 [sum of lengths], 1 where a token counts in the loss; None without a loss mask.
    """

    tokens: Array
    lengths: I64
    mask: Array | None = None


class TokenSource(Protocol):
    """One file of tokens: a small value that pickles. Its header is checked before it is made.

    Attributes:
        path: path of the file.
        masked: whether it has a loss mask.
    """

    @property
    def path(self) -> Path: ...

    @property
    def masked(self) -> bool: ...

    def read(self) -> Iterator[Documents]:
        """Reads all documents in order.

        Raises:
            DataError: the file is damaged.
        """


def by_blocks(tokens: Array, ends: Array, mask: Array | None = None) -> Iterator[Documents]:
    """Yields the documents of a file in groups of about `BLOCK_TOKENS` tokens.

    Args:
        tokens: [n], all ids.
        ends: int64 [documents], position at which each document ends, ascending.
        mask: uint8 [n] or None.
    """
    first, start = 0, 0
    while first < len(ends):
        # at least one document, and all that end within the block
        last = max(first + 1, int(np.searchsorted(ends[first:], start + BLOCK_TOKENS, side="right")) + first)
        bounds = np.concatenate([[start], ends[first:last]]).astype(np.int64)
        part = slice(start, int(bounds[-1]))
        yield Documents(tokens[part], np.diff(bounds), None if mask is None else mask[part])
        first, start = last, part.stop


def split_at(parts: Iterable[Documents], eos: int, *, first: bool) -> Iterator[Documents]:
    """Splits tokens into documents at the end-of-text id, across rows and files; their own lengths are ignored.

    Memory: the longest document.

    Args:
        parts: tokens in order.
        eos: end-of-text id.
        first: whether the id begins a document, as in llm.c; otherwise it ends one.
    """
    rest: list[Documents] = []
    for part in parts:
        ends = np.flatnonzero(part.tokens == eos) + (0 if first else 1)
        if not ends.size:
            rest.append(part)
            continue
        last = int(ends[-1])
        begun = sum(each.tokens.size for each in rest)
        lengths = np.diff(np.concatenate([[-begun], ends]))
        yield _joined([*rest, _slice(part, 0, last)], lengths)
        rest = [_slice(part, last, part.tokens.size)]
    left = sum(each.tokens.size for each in rest)
    if left:
        yield _joined(rest, np.array([left]))


def _slice(part: Documents, start: int, stop: int) -> Documents:
    mask = None if part.mask is None else part.mask[start:stop]
    return Documents(part.tokens[start:stop], part.lengths, mask)


def _joined(parts: list[Documents], lengths: I64) -> Documents:
    masks = [np.ones(part.tokens.size, np.uint8) if part.mask is None else part.mask for part in parts]
    mask = None if all(part.mask is None for part in parts) else np.concatenate(masks)
    return Documents(np.concatenate([part.tokens for part in parts]), lengths, mask)
