"""Reading a unit of the plan, whatever its type."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from data_prep.config import Source
from data_prep.plan import Unit
from data_prep.readers import hf, jsonl, parquet, text
from data_prep.readers.bytesource import DamagedFileError
from data_prep.readers.records import DAMAGED_FILE, Bad, Document
from headrace.errors import DataError

_CHUNK_BYTES = 1 << 20


def read_unit(unit: Unit, source: Source) -> Iterator[Document | Bad]:
    """Yields the documents of a unit, and what was not readable.

    A damaged file ends with a `Bad` of the reason `DAMAGED_FILE`; what was read before the damage stands.

    Raises:
        DataError: the file is not the one that was planned: it is gone, or its size has changed.
    """
    before = _stat(unit)
    try:
        yield from _documents(unit, source)
    except DamagedFileError as error:
        yield Bad(unit.source, unit.file, "file", None, DAMAGED_FILE, str(error))
    if _stat(unit) != before:
        raise DataError(f"{unit.path} was changed while it was read\n  try: leave the corpus alone and run again")


def hash_unit(unit: Unit) -> str:
    """SHA-256 of the bytes [start, end) of the unit's file, as stored."""
    digest = hashlib.sha256()
    left = unit.end - unit.start
    with Path(unit.path).open("rb") as file:
        file.seek(unit.start)
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


class _Fields(TypedDict):
    text_field: str
    id_field: str | None


def _documents(unit: Unit, source: Source) -> Iterator[Document | Bad]:
    name, fields = unit.source, _Fields(text_field=source.text_field, id_field=source.id_field)
    if unit.type == "text":
        return text.read(unit.path, source=name, file=unit.file)
    if unit.type == "jsonl":
        end = unit.end if unit.parts > 1 else None
        return jsonl.read(unit.path, source=name, file=unit.file, start=unit.start, end=end, **fields)
    if unit.type == "parquet":
        first, end_group = unit.first_group, unit.end_group
        return parquet.read(unit.path, source=name, file=unit.file, first_group=first, end_group=end_group, **fields)
    return hf.read(unit.path, source=name, file=unit.file, **fields)


def _stat(unit: Unit) -> tuple[int, int]:
    try:
        found = Path(unit.path).stat()
    except FileNotFoundError:
        raise DataError(f"{unit.path} has gone since the job was planned\n  try: bring it back and run again") from None
    if found.st_size != unit.file_bytes:
        raise DataError(
            f"{unit.path} has {found.st_size} bytes, and had {unit.file_bytes} when the job was planned\n"
            "  try: restore it, or remove the job directory to start over"
        )
    return found.st_size, found.st_mtime_ns
