"""FineWeb quality filter, after Penedo et al. 2024 (arXiv 2406.17557), section 3.6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex  # type: ignore[import-untyped]

from data_prep.clean.document import Document
from data_prep.clean.words import Splitter
from data_prep.config.cleaning import FineWebQualitySection

_ENDS_SENTENCE = regex.compile(r"\p{Sentence_Terminal}")


class FineWebQuality:
    """Rules on lines that end a sentence, short lines, repeated lines and line feeds per word. Ignores empty lines."""

    def __init__(self, section: FineWebQualitySection, splitter: Splitter) -> None:
        self._section = section
        self._splitter = splitter
        self._ends = _SentenceTerminals()

    def __call__(self, document: Document, _: Mapping[str, Any]) -> Document | str:
        """Implements `chain.Rule`."""
        lines = [line for line in document.lines if line and not line.isspace()]
        if not lines:
            return "no lines"
        return self._line_shapes(lines) or self._repetition(document, lines) or self._line_feeds(document) or document

    def _line_shapes(self, lines: list[str]) -> str | None:
        section = self._section
        if section.min_ended_lines is not None:
            ended = sum([self._ends[line[-1]] for line in lines])
            if ended / len(lines) < section.min_ended_lines:
                return "few lines end a sentence"
        if section.max_short_lines is not None:
            short = sum([len(line) <= section.short_line for line in lines])
            if short / len(lines) > section.max_short_lines:
                return "many short lines"
        return None

    def _repetition(self, document: Document, lines: list[str]) -> str | None:
        unique = set(lines)
        if len(unique) == len(lines) or self._section.max_duplicate_characters is None:
            return None
        repeated = sum(map(len, lines)) - sum(map(len, unique))
        if repeated / (len(document.text) - document.line_feeds) > self._section.max_duplicate_characters:
            return "characters in duplicate lines"
        return None

    def _line_feeds(self, document: Document) -> str | None:
        limit = self._section.max_line_feeds
        if limit is not None and document.line_feeds > limit * len(document.words(self._splitter).length):
            return "many line feeds"
        return None


class _SentenceTerminals(dict[str, bool]):
    """Cache: whether a character ends a sentence in some script (Unicode property Sentence_Terminal)."""

    def __missing__(self, character: str) -> bool:
        ends = self[character] = bool(_ENDS_SENTENCE.match(character))
        return ends
