"""Readers of the files that cleaning steps need: lists with one entry per line, and evaluation data."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from foundation.errors import ConfigError


def read_entries(paths: Sequence[str], *, field: str) -> list[str]:
    """Reads the stripped lines of all files, without empty lines and comments (lines that start with #).

    Raises:
        ConfigError: a file is missing, or no file has an entry.
    """
    lines = [line.strip() for path in paths for line in read_text(path, field=field).splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if paths and not found:
        raise ConfigError(
            field, list(paths), why="the list has no entries", remedy="give a file with one entry per line"
        )
    return found


def evaluation_texts(path: str, *, fields: Sequence[str] | None, field: str) -> Iterator[str]:
    """The texts of an evaluation file: all strings in the records of a .jsonl, at any depth; another file is one text.

    Args:
        path: the file; .gz is decompressed.
        fields: names of the record fields to use; None for all.
        field: the config field that names the file.

    Raises:
        ConfigError: the file is missing or not UTF-8, or a line is not a JSON object or lacks one of the fields.
    """
    whole = read_text(path, field=field)
    if not path.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        yield whole
        return
    for number, line in enumerate(whole.split("\n"), 1):
        if line.strip():
            yield from _strings(_record(line, fields, at=f"{path}:{number}", field=field))


def read_text(path: str, *, field: str) -> str:
    """Reads a UTF-8 file; .gz is decompressed.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    try:
        raw = Path(path).read_bytes()
        return (gzip.decompress(raw) if path.endswith(".gz") else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(field, path, why=str(error), remedy="give an existing file of UTF-8 text") from None


def _record(line: str, fields: Sequence[str] | None, *, at: str, field: str) -> list[Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(field, at, why=f"not JSON: {error}", remedy="give one JSON object per line") from None
    if not isinstance(record, dict):
        raise ConfigError(field, at, why="the line is not a JSON object", remedy="give one JSON object per line")
    if fields is None:
        return list(record.values())
    missing = [name for name in fields if name not in record]
    if missing:
        why = f"the record has no field {missing[0]!r}"
        raise ConfigError(field, at, why=why, remedy=f"its fields are: {', '.join(record)}")
    return [record[name] for name in fields]


def _strings(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict):
        yield from _strings(list(values.values()))
    elif isinstance(values, list):
        for value in values:
            yield from _strings(value)
