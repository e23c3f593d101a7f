"""Line deduplication: hashes of lines or paragraphs, and their removal (menus, licenses, "all rights reserved").

C4 keeps one occurrence of every three-sentence span (Raffel et al. 2020, section 2.2), CCNet one of every paragraph
(Wenzek et al. 2020, section 3.1). Here lines or paragraphs are compared after CCNet's normalization: case, digits and
white space at the ends are ignored.
"""

from __future__ import annotations

from itertools import compress

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_prep.config.dedup import LinesSection

EXEMPT = 0
"""The hash of a line that is too short to be compared."""
_NORMALISE = bytes.maketrans(b"123456789\t\r", b"000000000  ")  # every digit is 0; tab and CR are a space


def line_hashes(text: str, *, section: LinesSection) -> NDArray[np.uint64]:
    """XXH3-64 of each normalized line or paragraph of a text.

    Returns:
        uint64[lines]; `EXEMPT` for a line of less than `section.min_bytes` of UTF-8 when normalized.
    """
    plain = text.lower().encode("utf-8", "surrogatepass").translate(_NORMALISE)
    digest, shortest = xxhash.xxh3_64_intdigest, max(section.min_bytes, 1)
    stripped = map(bytes.strip, plain.split(_separator(section).encode()))
    return np.fromiter((digest(line) if len(line) >= shortest else EXEMPT for line in stripped), dtype=np.uint64)


def remove_lines(text: str, dropped: NDArray[np.bool_], *, section: LinesSection) -> str:
    """The text without the lines or paragraphs for which `dropped`, bool[lines], is true."""
    if not dropped.any():
        return text
    separator = _separator(section)
    lines = text.split(separator)
    assert len(lines) == len(dropped)
    return separator.join(compress(lines, (~dropped).tolist()))


def _separator(section: LinesSection) -> str:
    """Separator of lines or paragraphs. A paragraph ends at an empty line."""
    return "\n" if section.unit == "line" else "\n\n"
