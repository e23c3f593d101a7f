"""What the rules ask about a text, computed when the first one asks and kept for the others."""

from __future__ import annotations

from functools import cached_property

from data_prep.clean.ngrams import Keys
from data_prep.clean.words import PLAIN_WORDS, Splitter, Words


class Statistics:
    """A text, and what has been found out about it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._words: dict[Splitter, Words] = {}

    def words(self, splitter: Splitter) -> Words:
        """The text's words under one definition."""
        if splitter not in self._words:
            self._words[splitter] = splitter.words(self.text)
        return self._words[splitter]

    @cached_property
    def folded(self) -> str:
        """The text in lower case."""
        return self.text.lower()

    @cached_property
    def folded_keys(self) -> Keys:
        """The keys of the runs of letters and digits in `folded`: uint64[words]."""
        return PLAIN_WORDS.keys(self.folded)

    @cached_property
    def lines(self) -> list[str]:
        """What stands between line feeds, empty lines included."""
        return self.text.split("\n")

    @cached_property
    def line_feeds(self) -> int:
        """Number of line feeds."""
        return self.text.count("\n")
