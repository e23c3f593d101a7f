"""JSON from other programs: it may be damaged, in another encoding, nested 100,000 deep, or not an object."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from foundation.errors import DataError, HeadraceError


def read_json(
    file: Path, *, remedy: str = "download or copy it again", error: type[HeadraceError] = DataError
) -> dict[str, Any]:
    """Reads the object in a file.

    Raises:
        error: the file is not JSON in UTF-8, or holds no object; `remedy` says what to do.
        OSError: the file cannot be read.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as reason:
        raise error(f"{file} is damaged: {reason}\n  try: {remedy}") from None
    if not isinstance(found, dict):
        raise error(f"{file} is damaged: it holds a {type(found).__name__}, not an object\n  try: {remedy}")
    return found


def json_row(line: str | bytes) -> dict[str, Any] | None:
    """Parses the object in a line; None if the line is damaged or holds another value."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        return found if isinstance(found, dict) else None
    return None
