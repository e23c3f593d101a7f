"""Gopher filters: repetition and quality (Rae et al. 2021, arXiv 2112.11446, appendix A1.1).

Fractions are computed as in datatrove, to give thresholds the same meaning: the denominator is the characters of the
whole text, a paragraph ends at two or more line feeds, and repeated n-grams do not overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from data_prep.clean.document import Document
from data_prep.clean.ngrams import Keys, max_weight_bound, repeated
from data_prep.clean.words import Ints, Splitter, Words
from data_prep.config.cleaning import GopherQualitySection, GopherRepetitionSection


class GopherRepetition:
    """Repetition filter (table A1): duplicate lines and paragraphs, frequent and repeated n-grams."""

    def __init__(self, section: GopherRepetitionSection, splitter: Splitter) -> None:
        self._section = section
        self._splitter = splitter
        limits = section.model_dump()
        self._top = [(n, limits[f"top_{n}gram"]) for n in (2, 3, 4) if limits[f"top_{n}gram"] is not None]
        name = "duplicate_{}grams"
        self._repeated = [(n, limits[name.format(n)]) for n in range(5, 11) if limits[name.format(n)] is not None]

    def __call__(self, document: Document, _: Mapping[str, Any]) -> Document | str:
        """Implements `chain.Rule`."""
        return self._paragraphs(document) or self._lines(document) or self._ngrams(document) or document

    def _paragraphs(self, document: Document) -> str | None:
        paragraphs = [p for p in (part.lstrip("\n") for part in document.text.strip().split("\n\n")) if p]
        count, size = _duplicates(paragraphs)
        if _above(count, len(paragraphs), self._section.duplicate_paragraphs):
            return "duplicate paragraphs"
        if _above(size, len(document.text), self._section.duplicate_paragraph_characters):
            return "characters in duplicate paragraphs"
        return None

    def _lines(self, document: Document) -> str | None:
        lines = [line for line in document.lines if line]
        count, size = _duplicates(lines)
        # leading or trailing line feeds count as one empty line at each end, as in datatrove
        ends = (document.lines[0] == "") + (document.lines[-1] == "")
        if _above(count + (ends == 2), len(lines) + ends, self._section.duplicate_lines):
            return "duplicate lines"
        if _above(size, len(document.text), self._section.duplicate_line_characters):
            return "characters in duplicate lines"
        return None

    def _ngrams(self, document: Document) -> str | None:
        words, total = document.words(self._splitter), len(document.text)
        # number of characters in the words before each word, and in all words
        before = np.zeros(len(words.length) + 1, np.int64)
        words.length.cumsum(out=before[1:])
        return self._top_ngrams(words, before, total) or self._repeated_ngrams(words, before, total)

    def _top_ngrams(self, words: Words, before: Ints, total: int) -> str | None:
        if len(words.length) < 2 or not self._top:
            return None
        pairs = max_weight_bound(words.ngrams.of(2), before[2:] - before[:-2] + 1)
        for n, limit in self._top:
            # upper bound: an n-gram is at most as long as its n - 1 word pairs, each of which is at least as frequent
            if (
                pairs * (n - 1) > limit * total
                and _top_characters(words, before, n, at_most=limit * total) > limit * total
            ):
                return f"top {n}-gram"
        return None

    def _repeated_ngrams(self, words: Words, before: Ints, total: int) -> str | None:
        if not self._repeated:
            return None
        limits, shortest = dict(self._repeated), self._repeated[0][0]
        starts = repeated(words.ngrams.of(shortest)).nonzero()[0]
        keys = words.ngrams.of(shortest)[starts]
        for n in range(shortest, self._repeated[-1][0] + 1):
            if n > shortest:
                starts, keys = _longer(words, starts, keys, n)
            # words of a repeated longer n-gram are also in repeated shorter ones: most texts return at once
            if not len(starts) or _covered(words, starts, n) <= min(limits.values()) * total:
                return None
            limit = limits.get(n, 1.0) * total
            sizes = before[starts + n] - before[starts]
            # the total size is an upper bound of the exact count
            if sizes.sum() > limit and _repeated_characters(keys, starts, sizes, n) > limit:
                return f"duplicate {n}-grams"
        return None


class GopherQuality:
    """Quality filter: rules on length, word length, symbols, bullets, ellipses, letters and stop words."""

    def __init__(self, section: GopherQualitySection, splitter: Splitter) -> None:
        self._section = section
        self._splitter = splitter
        self._stop = [np.uint64(splitter.key(word)) for word in dict.fromkeys(section.stop_words)]

    def __call__(self, document: Document, _: Mapping[str, Any]) -> Document | str:
        """Implements `chain.Rule`."""
        words = document.words(self._splitter)
        if not len(words.length):
            return "too few words"
        return (
            self._sizes(words)
            or self._symbols(document, len(words.length))
            or self._letters_and_stop_words(words)
            or document
        )

    def _sizes(self, words: Words) -> str | None:
        section = self._section
        count = int(np.count_nonzero(words.plain))
        if section.min_words is not None and count < section.min_words:
            return "too few words"
        if section.max_words is not None and count > section.max_words:
            return "too many words"
        mean = int(words.length[words.plain].sum()) / count if count else 0.0
        if section.min_word_length is not None and mean < section.min_word_length:
            return "words too short"
        if section.max_word_length is not None and mean > section.max_word_length:
            return "words too long"
        return None

    def _symbols(self, document: Document, words: int) -> str | None:
        section, string = self._section, document.text
        if _above(string.count("#"), words, section.max_hashes):
            return "too many hashes"
        ellipses = string.count("...") + string.count("…")
        if _above(ellipses, words, section.max_ellipses):
            return "too many ellipses"
        lines = string.splitlines()
        # the count in the whole text is an upper bound: checking how each line begins and ends is slow
        bullet_characters = string.count("-") + string.count("•")
        if _above(bullet_characters, len(lines), section.max_bullet_lines):
            bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
            if _above(bullets, len(lines), section.max_bullet_lines):
                return "too many bullets"
        if _above(ellipses, len(lines), section.max_ellipsis_lines):
            trailing = sum(line.rstrip().endswith(("...", "…")) for line in lines)
            if _above(trailing, len(lines), section.max_ellipsis_lines):
                return "too many lines end in an ellipsis"
        return None

    def _letters_and_stop_words(self, words: Words) -> str | None:
        letters = int(np.count_nonzero(words.letters))
        if self._section.min_letter_words is not None and letters / len(words.length) < self._section.min_letter_words:
            return "too few words with letters"
        if not self._has_stop_words(words.ngrams.of(1)):
            return "too few stop words"
        return None

    def _has_stop_words(self, keys: Keys) -> bool:
        missing = self._section.min_stop_words or 0
        for stop in self._stop:
            if missing <= 0:
                break
            missing -= bool((keys == stop).any())
        return missing <= 0


def _above(part: int, whole: int, limit: float | None) -> bool:
    """Whether part / whole exceeds the limit; None is no limit."""
    return limit is not None and whole > 0 and part / whole > limit


def _duplicates(elements: list[str]) -> tuple[int, int]:
    """Number of elements that repeat an earlier one, and of the characters in them."""
    unique = set(elements)
    if len(unique) == len(elements):
        return 0, 0
    return len(elements) - len(unique), sum(map(len, elements)) - sum(map(len, unique))


def _top_characters(words: Words, before: Ints, n: int, *, at_most: float) -> float:
    """Characters in all occurrences of the most frequent n-gram (the first of equally frequent ones), spaces included.

    If the exact number is not above `at_most`, any number up to `at_most` may be returned.
    """
    keys = words.ngrams.of(n)
    sizes = before[n:] - before[:-n] + (n - 1)
    if not len(keys) or max_weight_bound(keys, sizes) <= at_most:
        return 0
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    count = counts.max()
    return int(count * sizes[first[counts == count].min()])


def _longer(words: Words, starts: Ints, keys: Keys, n: int) -> tuple[Ints, Keys]:
    """First words and keys of the repeated n-grams, found among the repeated (n-1)-grams."""
    complete = starts + n <= len(words.length)
    starts, keys = starts[complete], keys[complete]
    keys = words.ngrams.longer(keys, starts, n=n)
    kept = repeated(keys)
    return starts[kept], keys[kept]


def _covered(words: Words, starts: Ints, n: int) -> int:
    """Number of characters in words within the n-grams that start at `starts`."""
    inside = np.zeros(len(words.length) + 1, np.int32)
    inside[starts] += 1
    inside[starts + n] -= 1
    return int(words.length[inside[:-1].cumsum() > 0].sum())


def _repeated_characters(keys: Keys, starts: Ints, sizes: Ints, n: int) -> int:
    """Number of characters in n-grams that repeat an earlier one, from left to right, without overlap.

    Args:
        keys: keys of the n-grams that occur more than once, in order.
        starts: index of the first word of each n-gram.
        sizes: characters of each n-gram.
        n: words per n-gram.
    """
    seen: set[int] = set()
    total = free = 0
    for key, start, size in zip(keys.tolist(), starts.tolist(), sizes.tolist(), strict=True):
        if start < free:
            continue
        if key in seen:
            total, free = total + size, start + n
        else:
            seen.add(key)
    return total
