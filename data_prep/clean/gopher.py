"""Gopher's rules: repetition and quality (Rae et al. 2021, arXiv 2112.11446, appendix A1.1).

Fractions are counted as datatrove counts them, so that thresholds mean the same: characters of the whole text are the
denominator, a paragraph ends at two or more line feeds, repeated n-grams do not overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from data_prep.clean.ngrams import Keys, heaviest, repeated
from data_prep.clean.statistics import Statistics
from data_prep.clean.words import Ints, Splitter, Words
from data_prep.config.cleaning import GopherQualitySection, GopherRepetitionSection


class GopherRepetition:
    """Table A1: duplicate lines and paragraphs, frequent and repeated n-grams."""

    def __init__(self, section: GopherRepetitionSection, splitter: Splitter) -> None:
        self._section = section
        self._splitter = splitter
        limits = section.model_dump()
        self._top = [(n, limits[f"top_{n}gram"]) for n in (2, 3, 4) if limits[f"top_{n}gram"] is not None]
        name = "duplicate_{}grams"
        self._repeated = [(n, limits[name.format(n)]) for n in range(5, 11) if limits[name.format(n)] is not None]

    def __call__(self, text: Statistics, _: Mapping[str, Any]) -> Statistics | str:
        """See `chain.Rule`."""
        return self._paragraphs(text) or self._lines(text) or self._ngrams(text) or text

    def _paragraphs(self, text: Statistics) -> str | None:
        paragraphs = [p for p in (part.lstrip("\n") for part in text.text.strip().split("\n\n")) if p]
        count, size = _duplicates(paragraphs)
        if _above(count, len(paragraphs), self._section.duplicate_paragraphs):
            return "duplicate paragraphs"
        if _above(size, len(text.text), self._section.duplicate_paragraph_characters):
            return "characters in duplicate paragraphs"
        return None

    def _lines(self, text: Statistics) -> str | None:
        lines = [line for line in text.lines if line]
        count, size = _duplicates(lines)
        # a text that starts or ends with line feeds has an empty line there
        ends = (text.lines[0] == "") + (text.lines[-1] == "")
        if _above(count + (ends == 2), len(lines) + ends, self._section.duplicate_lines):
            return "duplicate lines"
        if _above(size, len(text.text), self._section.duplicate_line_characters):
            return "characters in duplicate lines"
        return None

    def _ngrams(self, text: Statistics) -> str | None:
        words, total = text.words(self._splitter), len(text.text)
        # characters before each word, and of all
        before = np.zeros(len(words.length) + 1, np.int64)
        words.length.cumsum(out=before[1:])
        return self._top_ngrams(words, before, total) or self._repeated_ngrams(words, before, total)

    def _top_ngrams(self, words: Words, before: Ints, total: int) -> str | None:
        if len(words.length) < 2 or not self._top:
            return None
        pairs = heaviest(words.ngrams.of(2), before[2:] - before[:-2] + 1)
        for n, limit in self._top:
            # an n-gram is no longer than the n - 1 pairs of words in it, and each of them is as frequent
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
            # words of a repeated longer n-gram are words of repeated shorter ones: most texts are done at once
            if not len(starts) or _covered(words, starts, n) <= min(limits.values()) * total:
                return None
            limit = limits.get(n, 1.0) * total
            sizes = before[starts + n] - before[starts]
            # all of them together bound those that are counted one by one
            if sizes.sum() > limit and _repeated_characters(keys, starts, sizes, n) > limit:
                return f"duplicate {n}-grams"
        return None


class GopherQuality:
    """Length, words, symbols, bullets, ellipses, letters and stop words."""

    def __init__(self, section: GopherQualitySection, splitter: Splitter) -> None:
        self._section = section
        self._splitter = splitter
        self._stop = [np.uint64(splitter.key(word)) for word in dict.fromkeys(section.stop_words)]

    def __call__(self, text: Statistics, _: Mapping[str, Any]) -> Statistics | str:
        """See `chain.Rule`."""
        words = text.words(self._splitter)
        if not len(words.length):
            return "too few words"
        return self._sizes(words) or self._symbols(text, len(words.length)) or self._kinds(words) or text

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

    def _symbols(self, text: Statistics, words: int) -> str | None:
        section, string = self._section, text.text
        if _above(string.count("#"), words, section.max_hashes):
            return "too many hashes"
        ellipses = string.count("...") + string.count("…")
        if _above(ellipses, words, section.max_ellipses):
            return "too many ellipses"
        lines = string.splitlines()
        # signs in the whole text bound the lines that have one at an end, which would have to be looked at one by one
        signs = string.count("-") + string.count("•")
        if _above(signs, len(lines), section.max_bullet_lines):
            bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
            if _above(bullets, len(lines), section.max_bullet_lines):
                return "too many bullets"
        if _above(ellipses, len(lines), section.max_ellipsis_lines):
            trailing = sum(line.rstrip().endswith(("...", "…")) for line in lines)
            if _above(trailing, len(lines), section.max_ellipsis_lines):
                return "too many lines end in an ellipsis"
        return None

    def _kinds(self, words: Words) -> str | None:
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
    return limit is not None and whole > 0 and part / whole > limit


def _duplicates(elements: list[str]) -> tuple[int, int]:
    """Elements that occurred before, and their characters."""
    unique = set(elements)
    if len(unique) == len(elements):
        return 0, 0
    return len(elements) - len(unique), sum(map(len, elements)) - sum(map(len, unique))


def _top_characters(words: Words, before: Ints, n: int, *, at_most: float) -> float:
    """Characters of all occurrences of the most frequent n-gram, blanks within included; of the first of equals.

    May be any number up to `at_most` where the true one is not above it.
    """
    keys = words.ngrams.of(n)
    sizes = before[n:] - before[:-n] + (n - 1)
    if not len(keys) or heaviest(keys, sizes) <= at_most:
        return 0
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    count = counts.max()
    return int(count * sizes[first[counts == count].min()])


def _longer(words: Words, starts: Ints, keys: Keys, n: int) -> tuple[Ints, Keys]:
    """The repeated n-grams, given the repeated ones of n - 1 words: where they start, and their keys."""
    whole = starts + n <= len(words.length)
    starts, keys = starts[whole], keys[whole]
    keys = words.ngrams.longer(keys, starts, n=n)
    again = repeated(keys)
    return starts[again], keys[again]


def _covered(words: Words, starts: Ints, n: int) -> int:
    """Characters of the words within the n-grams that start at `starts`."""
    inside = np.zeros(len(words.length) + 1, np.int32)
    inside[starts] += 1
    inside[starts + n] -= 1
    return int(words.length[inside[:-1].cumsum() > 0].sum())


def _repeated_characters(keys: Keys, starts: Ints, sizes: Ints, n: int) -> int:
    """Characters in n-grams that occurred before, from left to right, without overlap.

    Args:
        keys: keys of the n-grams that occur more than once, in order.
        starts: the words at which they start.
        sizes: their characters.
        n: their words.
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
