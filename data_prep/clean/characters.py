"""Character classes of a text as numpy arrays, to find words without a Python object per character."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[Any]
"""Code points: uint8[characters] if all are ASCII, else uint32[characters]."""
Kinds = npt.NDArray[np.uint8]
"""Class (the lower three bits) and flags of each character: uint8[characters]."""

CLASS_MASK = 7
SPACE, OTHER, LETTERLIKE, DIGIT, APOSTROPHE, DOT, COMMA, STROKE = range(8)
r"""Character classes. SPACE is whitespace as in `str.split`; LETTERLIKE and DIGIT together are \w of `re`; @ counts as
an APOSTROPHE; everything else is OTHER."""
LETTER = 8
"""Flag: a letter, as in `str.isalpha`."""
PLAIN = 16
"""Flag: not punctuation, symbol, control or separator (Unicode's categories P, S, C and Z)."""
_KNOWN = 128

# spaCy joins a run of STROKEs into one token, and splits runs of other punctuation
_SPECIAL = {"'": APOSTROPHE, "’": APOSTROPHE, "@": APOSTROPHE, ".": DOT, ",": COMMA, **dict.fromkeys("-~|/\\^", STROKE)}

# cache; 0 for unseen characters: computing all classes takes a second
_KINDS: Kinds = np.zeros(0x110000, np.uint8)


def codes(text: str) -> Codes:
    """The code points of a text: uint8 or uint32 [characters]."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


def kinds(code: Codes) -> Kinds:
    """Class and flags of each character: uint8[characters]."""
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
        return SPACE
    if c.isdecimal():
        return DIGIT
    return LETTERLIKE if c.isalnum() or c == "_" else _SPECIAL.get(c, OTHER)
