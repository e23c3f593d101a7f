"""The words of a text: where they are, a 64-bit key of each, and what rules ask about them.

The Gopher paper (Rae et al. 2021, appendix A1.1) does not say what a word is. Dolma and RedPajama took what stands
between blanks; FineWeb took tokens in which punctuation stands apart, from NLTK and later spaCy. The same thresholds
then mean different things: a text whose every tenth character is a mark has about twice as many words.

numpy does all over the characters of the text: looking words up in a dictionary takes 170 ns each, a miss of the
processor's cache, before anything is known about them.
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
Joined = Callable[[int, int, int, int], bool]
"""Whether the second and the third of four neighbours, given by their classes, are in one word."""

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_BLOCK = 1 << 20  # characters hashed at once: bounds the memory for very long texts


class Words(NamedTuple):
    """Arrays over the words of a text, in order.

    length: int64, characters. plain: bool, more than punctuation and signs. letters: bool, at least one letter in it.
    """

    length: Ints
    plain: Bools
    letters: Bools
    ngrams: NGrams


class Splitter(Protocol):
    """One definition of a word."""

    def words(self, text: str) -> Words:
        """The words of a text."""

    def key(self, word: str) -> int:
        """The key that a word has in `Words.ngrams.of(1)`."""


class CharacterSplitter:
    """Words as runs of characters, of which each pair is joined or not, depending on the two and one more on each side.

    Args:
        inside: the classes of characters that are in words at all.
        joined: the rule for pairs of such characters.
    """

    def __init__(self, inside: frozenset[int], joined: Joined) -> None:
        # for each window of four classes: 1 if a word starts at its third, 2 if one ends before it
        windows = product(range(8), repeat=4)
        self._edges = np.array([_edge(window, inside, joined) for window in windows], np.uint8)

    def words(self, text: str) -> Words:
        """See `Splitter`."""
        code = kind.codes(text)
        kinds = kind.kinds(code)
        starts, ends = self._bounds(kinds)
        # what may follow a word in its stretch has none of the flags asked for below, if it is blank
        flags = np.bitwise_or.reduceat(kinds, starts) if len(starts) else np.empty(0, np.uint8)
        keys = word_keys(code, starts, ends)
        return Words(ends - starts, (flags & kind.PLAIN) != 0, (flags & kind.LETTER) != 0, NGrams(keys))

    def keys(self, text: str) -> Keys:
        """The keys of the words alone: uint64[words]."""
        code = kind.codes(text)
        return word_keys(code, *self._bounds(kind.kinds(code)))

    def key(self, word: str) -> int:
        """See `Splitter`."""
        code = kind.codes(word)
        return int(word_keys(code, np.array([0]), np.array([len(code)]))[0])

    def _bounds(self, kinds: kind.Kinds) -> tuple[Ints, Ints]:
        """Where words start, and where they end (exclusive): int64[words] each."""
        classes = np.zeros(len(kinds) + 4, np.uint16)
        np.bitwise_and(kinds, kind.CLASS, out=classes[2:-2])
        pairs = classes[:-1] << 3
        pairs |= classes[1:]
        windows = pairs[:-2] << 6
        windows |= pairs[2:]
        edges = self._edges.take(windows)
        return (edges & 1).view(np.bool_).nonzero()[0], (edges > 1).nonzero()[0]


def word_keys(code: kind.Codes, starts: Ints, ends: Ints) -> Keys:
    """A hash of each word: the polynomial sum of code_i * base^i modulo 2^64, stirred.

    Args:
        code: code points of the text.
        starts: where words start, ascending.
        ends: where they end; between an end and the next start may be anything.
    """
    if len(code) <= _BLOCK:
        return _stirred(_polynomials(code, starts, ends))
    parts, at = [], 0
    while at < len(starts):
        upto = max(at + 1, int(np.searchsorted(ends, starts[at] + _BLOCK, side="right")))
        first, last = starts[at], ends[upto - 1]
        parts.append(_polynomials(code[first:last], starts[at:upto] - first, ends[at:upto] - first))
        at = upto
    return _stirred(np.concatenate(parts)) if parts else np.empty(0, np.uint64)


def _edge(window: tuple[int, ...], inside: frozenset[int], joined: Joined) -> int:
    before, here = window[1] in inside, window[2] in inside
    apart = not (before and here and joined(*window))
    return 1 * (here and apart) | 2 * (before and apart)


def _always(*_: int) -> bool:
    return True


def _marks_apart(first: int, a: int, b: int, last: int) -> bool:
    """Letters and digits, with dots, apostrophes and @ between, and commas between digits; rows of dots or strokes."""
    if a == b and a in (kind.DOT, kind.STROKE):
        return True
    return (a in _WORD or _holds(first, a, b)) and (b in _WORD or _holds(a, b, last))


def _holds(before: int, mark: int, after: int) -> bool:
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


def _stirred(keys: Keys) -> Keys:
    """Mixes the bits (the finalizer of MurmurHash3): sums of unstirred polynomials would collide."""
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
_NOT_BLANK = frozenset(range(8)) - {kind.BLANK}

WHITESPACE = CharacterSplitter(_NOT_BLANK, _always)
"""What `str.split` finds."""
PUNCTUATION = CharacterSplitter(_NOT_BLANK, _marks_apart)
"""Words without the marks around them, and the marks."""
PLAIN_WORDS = CharacterSplitter(_WORD, _always)
r"""What `re` finds by \w+: the words of blocklists and of decontamination, which read text in lower case."""
