"""C4 filter, after Raffel et al. 2020 (arXiv 1910.10683), section 2.2, and the code in tensorflow_datasets.

Each line is checked; lines that fail are removed, and the text is dropped if too few sentences remain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from data_prep.clean.document import Document
from data_prep.config.cleaning import C4Section

_ENDS = (".", "?", "!", '"', "'")
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
# sentence-final marks, but not after an initial; closing quotes or brackets; whitespace; and more text
_SENTENCE_END = re.compile(r"(?<![.!?…])(?<![.\s][A-Za-z])[.!?…]++[\"'”’)\]]*+\s++(?=\S)")


class C4:
    """The cleaning step of `C4Section`."""

    def __init__(self, section: C4Section) -> None:
        self._section = section

    def __call__(self, document: Document, _: Mapping[str, Any]) -> Document | str:
        """Implements `chain.Rule`."""
        lines = [line for line in map(str.strip, document.text.splitlines()) if line and self._well_formed(line)]
        lines = [line for line in map(self._without_citations, lines) if self._ends_sentence(line)]
        folded = "\n".join(lines).lower()
        if self._section.lorem_ipsum and "lorem ipsum" in folded:
            return "lorem ipsum"
        lines = _without(lines, ("javascript",) if self._section.javascript else (), folded)
        if self._section.curly_brackets and "{" in folded and any("{" in line for line in lines):
            return "curly bracket"
        lines = _without(lines, _POLICIES if self._section.policies else (), folded)
        if not self._enough_sentences(lines):
            return "too few sentences"
        kept = "\n".join(lines).strip()
        return document if kept == document.text else Document(kept)

    def _well_formed(self, line: str) -> bool:
        longest, least = self._section.max_word_length, self._section.min_words_per_line
        if longest is not None and len(line) > longest and any(len(word) > longest for word in line.split()):
            return False
        return len(line.split(None, least)) >= least

    def _without_citations(self, line: str) -> str:
        return _CITATION.sub("", line) if self._section.citations and "[" in line else line

    def _ends_sentence(self, line: str) -> bool:
        return not self._section.terminal_punctuation or (line.endswith(_ENDS) and not line.endswith("..."))

    def _enough_sentences(self, lines: list[str]) -> bool:
        """Whether there are enough sentences. Each line has at least one, so often no line needs to be searched."""
        least = self._section.min_sentences or 0
        found = len(lines)
        for line in lines:
            if found >= least:
                break
            found += len(_SENTENCE_END.findall(line))
        return found >= least


def _without(lines: list[str], phrases: tuple[str, ...], folded: str) -> list[str]:
    """The lines with none of the phrases, ignoring case; `folded` is all lines joined, in lower case."""
    phrases = tuple(phrase for phrase in phrases if phrase in folded)
    if not phrases:
        return lines
    return [line for line in lines if not any(phrase in line.lower() for phrase in phrases)]
