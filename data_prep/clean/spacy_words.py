"""Words by spaCy's English tokenizer, as in datatrove, with a cache per whitespace-separated piece of text.

spaCy's tokens of a piece without whitespace depend only on the piece, and texts repeat themselves: nearly all pieces of
a page are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from data_prep.clean import characters as kind
from data_prep.clean.ngrams import NGrams
from data_prep.clean.optional import import_optional
from data_prep.clean.words import Words

_CAPACITY = 1 << 18
"""Cached pieces before the cache is cleared: about 100 MB."""
_CAPACITY_CHARACTERS = 1 << 24
"""Cached characters before the cache is cleared: pieces of a text without whitespace can be very long."""


class SpacySplitter:
    """Implements `words.Splitter`.

    Raises:
        ConfigError: spaCy is not installed.
    """

    def __init__(self, *, field: str, capacity: int = _CAPACITY) -> None:
        self._tokenizer: Callable[[str], Any] = (
            import_optional("spacy", package="spacy", field=field).blank("en").tokenizer
        )
        self._capacity = capacity
        self._pieces: dict[str, tuple[int, ...]] = {}
        self._rows: dict[str, int] = {}
        self._clear()

    def words(self, text: str) -> Words:
        """Implements `words.Splitter`."""
        if len(self._pieces) > self._capacity or self._characters > _CAPACITY_CHARACTERS:
            self._clear()
        pieces, known = text.split(), self._pieces
        rows = [row for piece in pieces for row in (known.get(piece) or self._add_piece(piece))]
        features = self._features[np.array(rows, np.intp)]
        flags = features[:, 1]
        return Words(
            features[:, 0].astype(np.int64),
            (flags & np.uint64(kind.PLAIN)) != 0,
            (flags & np.uint64(kind.LETTER)) != 0,
            NGrams(np.ascontiguousarray(features[:, 2])),
        )

    def key(self, word: str) -> int:
        """Implements `words.Splitter`."""
        return xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))

    def _clear(self) -> None:
        self._pieces.clear()
        self._rows.clear()
        self._characters = 0
        # per word: length in characters, flags of its characters, key
        self._features = np.empty((1024, 3), np.uint64)

    def _add_piece(self, piece: str) -> tuple[int, ...]:
        """Tokenizes a new piece; returns the feature rows of its words."""
        words = (token.text.strip() for token in self._tokenizer(piece))
        self._pieces[piece] = rows = tuple(self._add_word(word) for word in words if word)
        self._characters += len(piece)
        return rows

    def _add_word(self, word: str) -> int:
        row = self._rows.get(word)
        if row is None:
            row = self._rows[word] = len(self._rows)
            if row == len(self._features):
                self._features = np.resize(self._features, (2 * row, 3))
            flags = int(np.bitwise_or.reduce(kind.kinds(kind.codes(word))))
            self._features[row] = len(word), flags, self.key(word)
        return row
