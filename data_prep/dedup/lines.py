"""Lines and paragraphs that many documents have in common: menus, licences, "all rights reserved".

C4 keeps one copy of every three-sentence span (Raffel et al. 2020, section 2.2), CCNet one of every paragraph
(Wenzek et al. 2020, section 3.1). Here it is lines or paragraphs, compared as CCNet does: without regard to case,
digits and blanks at the ends.
"""

from __future__ import annotations

from itertools import chain, compress

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_prep.config.dedup import LinesSection

EXEMPT = 0
"""The hash of a line that is too short to be compared."""
_SAME = bytes.maketrans(b"123456789\t\r", b"000000000  ")  # digits are one digit, blanks one blank


def line_hashes(text: str, *, section: LinesSection) -> NDArray[np.uint64]:
    """uint64[lines]: XXH3 of each line or paragraph of a text, normalised; `EXEMPT` where it has less
    than `section.min_bytes` of UTF-8 then."""
    plain = text.lower().encode("utf-8", "surrogatepass").translate(_SAME)
    digest, shortest = xxhash.xxh3_64_intdigest, max(section.min_bytes, 1)
    stripped = map(bytes.strip, plain.split(_between(section).encode()))
    return np.fromiter(
        (digest(line) if len(line) >= shortest else EXEMPT for line in stripped),
        dtype=np.uint64,
    )


def remove_lines(text: str, dropped: NDArray[np.bool_], *, section: LinesSection) -> str:
    """The text without those lines or paragraphs for which `dropped`, bool[lines], is true."""
    if not dropped.any():
        return text
    between = _between(section)
    lines = text.split(between)
    assert len(lines) == len(dropped)
    return between.join(compress(lines, chain((~dropped).tolist())))


def _between(section: LinesSection) -> str:
    """What ends a line or a paragraph. A paragraph ends at an empty line."""
    return "\n" if section.unit == "line" else "\n\n"
