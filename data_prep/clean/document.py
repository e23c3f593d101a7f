"""A text with lazily computed statistics, which the rules of the cleaning chain share."""

from __future__ import annotations

from functools import cached_property

from data_prep.clean.ngrams import Keys
from data_prep.clean.words import PLAIN_WORDS, Splitter, Words


class Document:
    """A text and its cached statistics."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._words: dict[Splitter, Words] = {}

    def words(self, splitter: Splitter) -> Words:
        """The text's words by one definition of a word."""
        if splitter not in self._words:
            self._words[splitter] = splitter.words(self.text)
        return self._words[splitter]

    @cached_property
    def folded(self) -> str:
        """The text in lower case."""
        return self.text.lower()

    @cached_property
    def folded_keys(self) -> Keys:
        """Keys of the words (runs of letters and digits) of `folded`: uint64[words]."""
        return PLAIN_WORDS.keys(self.folded)

    @cached_property
    def lines(self) -> list[str]:
        """The parts between line feeds, empty lines included."""
        return self.text.split("\n")

    @cached_property
    def line_feeds(self) -> int:
        """Number of line feeds."""
        return self.text.count("\n")
