"""Word segmentation: the words of a text, with their lengths, flags and 64-bit keys.

The Gopher paper (Rae et al. 2021, appendix A1.1) does not define a word. Dolma and RedPajama split at whitespace.
FineWeb used tokens of NLTK, later of spaCy, which separate punctuation. So the same thresholds mean different things:
if every tenth character is punctuation, a text has about twice as many words.

numpy computes everything from the text's characters: a dictionary lookup per word alone costs 170 ns, a cache miss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from data_prep.clean import characters as kind
from data_prep.clean.ngrams import Keys, NGrams

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
JoinRule = Callable[[int, int, int, int], bool]
"""Function that tells whether the second and third of four consecutive characters, given by class, are in one word."""

_BASE = 0x9E3779B97F4A7C15  # odd, so that it is invertible modulo 2^64
_BLOCK = 1 << 20  # characters hashed at a time: bounds the memory for very long texts


class Words(NamedTuple):
    """Arrays over the words of a text, in order.

    Attributes:
        length: int64[words], in characters.
        plain: bool[words], whether the word contains more than punctuation and symbols.
        letters: bool[words], whether the word contains a letter.
        ngrams: keys of the words and n-grams.
    """

    length: Ints
    plain: Bools
    letters: Bools
    ngrams: NGrams


class Splitter(Protocol):
    """A definition of a word, as a function that splits texts."""

    def words(self, text: str) -> Words:
        """The words of a text."""

    def key(self, word: str) -> int:
        """The key of a word, as in `Words.ngrams.of(1)`."""


class CharacterSplitter:
    """Splits a text into runs of characters; two characters and their neighbors decide whether the two are joined.

    Args:
        inside: classes of the characters that can be in words.
        joined: function that tells whether a pair of these characters belongs to one word.
    """

    def __init__(self, inside: frozenset[int], joined: JoinRule) -> None:
        # per window of four classes: bit 1 if a word starts at the third, bit 2 if one ends before it
        windows = product(range(8), repeat=4)
        self._edges = np.array([_edge(window, inside, joined) for window in windows], np.uint8)

    def words(self, text: str) -> Words:
        """Implements `Splitter`."""
        code = kind.codes(text)
        kinds = kind.kinds(code)
        starts, ends = self._bounds(kinds)
        # reduceat includes the characters up to the next word: whitespace has none of these flags
        flags = np.bitwise_or.reduceat(kinds, starts) if len(starts) else np.empty(0, np.uint8)
        keys = word_keys(code, starts, ends)
        return Words(ends - starts, (flags & kind.PLAIN) != 0, (flags & kind.LETTER) != 0, NGrams(keys))

    def keys(self, text: str) -> Keys:
        """Keys of the words only: uint64[words]."""
        code = kind.codes(text)
        return word_keys(code, *self._bounds(kind.kinds(code)))

    def key(self, word: str) -> int:
        """Implements `Splitter`."""
        code = kind.codes(word)
        return int(word_keys(code, np.array([0]), np.array([len(code)]))[0])

    def _bounds(self, kinds: kind.Kinds) -> tuple[Ints, Ints]:
        """Start and end (exclusive) of each word, in characters: int64[words] each."""
        classes = np.zeros(len(kinds) + 4, np.uint16)
        np.bitwise_and(kinds, kind.CLASS_MASK, out=classes[2:-2])
        pairs = classes[:-1] << 3
        pairs |= classes[1:]
        windows = pairs[:-2] << 6
        windows |= pairs[2:]
        edges = self._edges.take(windows)
        return (edges & 1).view(np.bool_).nonzero()[0], (edges > 1).nonzero()[0]


def word_keys(code: kind.Codes, starts: Ints, ends: Ints) -> Keys:
    """A hash of each word: the polynomial sum of code_i * base^i modulo 2^64, bit-mixed.

    Args:
        code: code points of the text.
        starts: first character of each word, ascending.
        ends: end of each word, exclusive; characters between words are ignored.

    Returns:
        uint64[words].
    """
    if len(code) <= _BLOCK:
        return _mixed(_polynomials(code, starts, ends))
    parts, at = [], 0
    while at < len(starts):
        upto = max(at + 1, int(np.searchsorted(ends, starts[at] + _BLOCK, side="right")))
        first, last = starts[at], ends[upto - 1]
        parts.append(_polynomials(code[first:last], starts[at:upto] - first, ends[at:upto] - first))
        at = upto
    return _mixed(np.concatenate(parts)) if parts else np.empty(0, np.uint64)


def _edge(window: tuple[int, ...], inside: frozenset[int], joined: JoinRule) -> int:
    before, here = window[1] in inside, window[2] in inside
    apart = not (before and here and joined(*window))
    return 1 * (here and apart) | 2 * (before and apart)


def _join_all(*_: int) -> bool:
    return True


def _separate_punctuation(first: int, a: int, b: int, last: int) -> bool:
    """Joins letters and digits, across . ' @ and, between digits, commas; and joins runs of dots or strokes."""
    if a == b and a in (kind.DOT, kind.STROKE):
        return True
    return (a in _WORD or _joins_neighbors(first, a, b)) and (b in _WORD or _joins_neighbors(a, b, last))


def _joins_neighbors(before: int, mark: int, after: int) -> bool:
    if mark == kind.COMMA:
        return before == after == kind.DIGIT
    return mark in (kind.DOT, kind.APOSTROPHE) and before in _WORD and after in _WORD


def _polynomials(code: kind.Codes, starts: Ints, ends: Ints) -> Keys:
    powers, inverses = _powers(1 << (len(code)).bit_length())
    sums = np.zeros(len(code) + 1, np.uint64)
    np.multiply(code, powers[: len(code)], out=sums[1:])
    np.cumsum(sums, out=sums)
    keys: Keys = (sums[ends] - sums[starts]) * inverses[starts]
    return keys


def _mixed(keys: Keys) -> Keys:
    """Mixes the bits (finalizer of MurmurHash3): sums of unmixed polynomials would collide."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        keys = (keys ^ (keys >> np.uint64(33))) * np.uint64(factor)
    return keys ^ (keys >> np.uint64(33))


@lru_cache(maxsize=32)
def _powers(count: int) -> tuple[Keys, Keys]:
    """The first powers of the base and of its inverse, modulo 2^64: uint64[count] each."""
    bases = np.full((2, count), _BASE, np.uint64)
    bases[1] = pow(_BASE, -1, 1 << 64)
    bases[:, 0] = 1
    powers = np.cumprod(bases, axis=1)
    return powers[0], powers[1]


_WORD = frozenset({kind.LETTERLIKE, kind.DIGIT})
_NOT_BLANK = frozenset(range(8)) - {kind.SPACE}

WHITESPACE = CharacterSplitter(_NOT_BLANK, _join_all)
"""Words as in `str.split`."""
PUNCTUATION = CharacterSplitter(_NOT_BLANK, _separate_punctuation)
"""Words without surrounding punctuation, and the punctuation marks as words of their own."""
PLAIN_WORDS = CharacterSplitter(_WORD, _join_all)
r"""Words as \w+ of `re`: used by blocklists and decontamination, on text in lower case."""
