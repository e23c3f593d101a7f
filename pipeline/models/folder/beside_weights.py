"""Files beside the weights: generation_config.json, and the names of code files. No torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from foundation.directory import write_json
from foundation.foreign_json import read_json

GENERATION = "generation_config.json"
_REMOTE_CODE = "auto_map"


def read_generation(folder: Path) -> dict[str, Any] | None:
    """Reads a model folder's generation settings (end tokens, sampling); None if there are none.

    Raises:
        DataError: the file is not a JSON object.
    """
    file = folder / GENERATION
    if not file.is_file():
        return None
    return read_json(file, remedy="download it again, or remove it")


def copy_generation(source: Path, target: Path) -> None:
    """Copies the file byte for byte: transformers would drop keys that have no effect, or refuse to write it."""
    if (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, target / GENERATION)


def with_end(generation: dict[str, Any], eos: int | None) -> dict[str, Any]:
    """Adds the token that ends training documents to the tokens that end a generation."""
    given = generation.get("eos_token_id")
    ends = given if isinstance(given, list) else [] if given is None else [given]
    return generation if eos is None or eos in ends else {**generation, "eos_token_id": [*ends, eos] if ends else eos}


def drop_remote_code(folder: Path) -> None:
    """Removes the names of Python files that a written folder lacks: programs would search them, or ask the user."""
    for name in ("config.json", "tokenizer_config.json"):
        file = folder / name
        found = read_json(file) if file.is_file() else {}
        if found.pop(_REMOTE_CODE, None) is not None:
            write_json(file, found)
