"""Very long words: runs without white space, such as a line of DNA or base64, or runs of white space.

The time to train a byte-level BPE grows with the square of the longest word (18 s for 200,000 letters), so training
cuts long words. Encoding takes linear time. Documents with very long words are listed, since they are seldom wanted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

TRAINED_CHARACTERS = 1024
"""Longest word in training, in characters; longer ones are cut into pieces of this length."""
NAMED_CHARACTERS = 50_000
"""Length in characters from which the longest word of a document is named."""


def _longer_than(characters: int) -> re.Pattern[str]:
    """Pattern of longer runs. Lookbehinds keep the search from starting within a run: it takes linear time."""
    more = characters + 1
    return re.compile(rf"(?<!\S)\S{{{more},}}|(?<!\s)\s{{{more},}}")


_TRAINED, _NAMED = _longer_than(TRAINED_CHARACTERS), _longer_than(NAMED_CHARACTERS - 1)


def cut_long_words(texts: Iterable[str], *, longest: int | None = None) -> Iterator[str]:
    """Yields texts without words of more than `TRAINED_CHARACTERS`; a text with longer words becomes several.

    Args:
        longest: number of characters to keep of a word; the rest is left out. None: no limit.
    """
    for text in texts:
        begin = 0
        for run in _TRAINED.finditer(text):
            end = run.end() if longest is None else min(run.end(), run.start() + longest)
            for at in range(run.start() + TRAINED_CHARACTERS, end, TRAINED_CHARACTERS):
                yield text[begin:at]
                begin = at
            if end < run.end():
                yield text[begin:end]
                begin = run.end()
        yield text[begin:]


def longest_word(text: str) -> int:
    """Characters of the longest word, 0 if that has fewer than `NAMED_CHARACTERS`."""
    if len(text) < NAMED_CHARACTERS:
        return 0
    return max((run.end() - run.start() for run in _NAMED.finditer(text)), default=0)
