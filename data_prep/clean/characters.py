"""Characters of a text as an array, and of which kind each is: words are found and judged without Python objects."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[Any]
"""Code points: uint8[characters] if all are ASCII, uint32[characters] else."""
Kinds = npt.NDArray[np.uint8]
"""Of each character its class (the lower three bits) and flags."""

CLASS = 7
BLANK, MARK, LETTERLIKE, DIGIT, APOSTROPHE, DOT, COMMA, STROKE = range(8)
r"""Whitespace as `str.split` has it; LETTERLIKE and DIGIT are what `re` calls \w; an @ is an APOSTROPHE too; all else
is a MARK."""
LETTER = 8
"""A letter, as `str.isalpha` has it."""
PLAIN = 16
"""Neither punctuation, sign, control nor blank: outside of Unicode's categories P, S, C and Z."""
_KNOWN = 128

# of signs in a row, spaCy takes STROKEs together, and others one by one
_SPECIAL = {
    "'": APOSTROPHE,
    "’": APOSTROPHE,
    "@": APOSTROPHE,
    ".": DOT,
    ",": COMMA,
    **dict.fromkeys("-~|/\\^", STROKE),
}

# 0 where a character has not been met yet: finding out for all of them takes a second
_KINDS: Kinds = np.zeros(0x110000, np.uint8)


def codes(text: str) -> Codes:
    """The code points of a text."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


def kinds(code: Codes) -> Kinds:
    """The kinds of characters: uint8[characters]."""
    found: Kinds = _KINDS.take(code)
    if not found.all():
        new = np.unique(code[found == 0])
        _KINDS[new] = [_kind(chr(c)) for c in new.tolist()]
        found = _KINDS.take(code)
    return found


def _kind(c: str) -> int:
    plain = unicodedata.category(c)[0] not in "PSCZ"
    return _KNOWN | _class(c) | LETTER * c.isalpha() | PLAIN * plain


def _class(c: str) -> int:
    if c.isspace():
        return BLANK
    if c.isdecimal():
        return DIGIT
    return LETTERLIKE if c.isalnum() or c == "_" else _SPECIAL.get(c, MARK)
