"""Files that a step reads when the chain is built: lists of one entry per line, and evaluation data."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from headrace.base.errors import ConfigError


def entries(paths: Sequence[str], *, field: str) -> list[str]:
    """The lines of all files, without blanks around them, empty lines and lines that start with #.

    Raises:
        ConfigError: a file is missing, or none has an entry.
    """
    lines = [line.strip() for path in paths for line in read(path, field=field).splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if paths and not found:
        raise ConfigError(field, list(paths), why="there is no entry in it", remedy="give a file with one per line")
    return found


def texts(path: str, *, fields: Sequence[str] | None, field: str) -> Iterator[str]:
    """The texts of an evaluation file: the strings in the records of a .jsonl, however deep; the whole of other files.

    Args:
        path: the file; .gz is decompressed.
        fields: names of the fields of a record that count; None for all.
        field: the config field that names the file.

    Raises:
        ConfigError: the file is missing, is not UTF-8, has a line that is no JSON object, or one without the fields.
    """
    whole = read(path, field=field)
    if not path.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        yield whole
        return
    for number, line in enumerate(whole.split("\n"), 1):
        if line.strip():
            yield from _strings(_record(line, fields, at=f"{path}:{number}", field=field))


def read(path: str, *, field: str) -> str:
    """The text of a file, decompressed if it is a .gz.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        raw = Path(path).read_bytes()
        return (gzip.decompress(raw) if path.endswith(".gz") else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(field, path, why=str(error), remedy="give a file of UTF-8 text that exists") from None


def _record(line: str, fields: Sequence[str] | None, *, at: str, field: str) -> list[Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(field, at, why=f"not JSON: {error}", remedy="give one JSON object per line") from None
    if not isinstance(record, dict):
        raise ConfigError(field, at, why="the line is no JSON object", remedy="give one JSON object per line")
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
