"""Reads a unit of input with the reader of its type; checks that the file has not changed since the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data_prep.config.corpus import Source
from data_prep.sources import jsonl, storage, text
from data_prep.sources.bytesource import DamagedFileError, Digest
from data_prep.sources.records import DAMAGED_FILE, BadRecord, TextBatch, WantedFields
from data_prep.sources.units import Unit
from foundation.errors import DataError
from foundation.storage import Stat, StorageError


def wanted_fields(source: Source, others: Sequence[str] = (), *, max_bytes: int | None = None) -> WantedFields:
    """The record fields to read from a source: text or messages, id, and `others` that the job needs.

    Args:
        max_bytes: largest record in bytes (`max_record_bytes`); None: no limit.
    """
    chat = source.messages_field is not None
    tools = source.tools_field if chat else None
    given = source.messages_field or source.text_field
    *prompt, text = [given] if isinstance(given, str) else given
    return WantedFields(
        text,
        source.id_field,
        tuple(others),
        conversation=chat,
        prompt=tuple(prompt),
        tools=tools,
        max_bytes=max_bytes,
        reader=source.reader,
    )


def unit_digest(unit: Unit) -> Digest:
    """A new digest for the bytes of a unit."""
    return Digest(unit.path, start=unit.start, end=unit.end)


def read_unit(unit: Unit, wanted: WantedFields, digest: Digest | None = None) -> Iterator[TextBatch | BadRecord]:
    """Yields the documents of a unit in batches, and its unreadable records.

    A damaged file, or row group of a parquet file, ends with a `BadRecord` with the reason `DAMAGED_FILE`; the
    documents before the damage are kept.

    Args:
        unit: unit to read.
        wanted: record fields to read.
        digest: digest of the unit, updated with the bytes that are read; None for a new one.

    Raises:
        DataError: the file was removed or changed since the job was planned, or its storage fails.
    """
    _check_unchanged(unit)
    try:
        yield from _batches(unit, wanted, digest or unit_digest(unit))
    except DamagedFileError as error:
        yield BadRecord(unit.source, unit.file, "file", None, DAMAGED_FILE, str(error))
    except (OSError, StorageError):  # a remote file that was replaced fails with a storage error
        _check_unchanged(unit)
        raise
    _check_unchanged(unit)


def _batches(unit: Unit, wanted: WantedFields, digest: Digest) -> Iterator[TextBatch | BadRecord]:
    path, source, file = unit.path, unit.source, unit.file
    if unit.type == "text":
        return text.read(path, source=source, file=file, digest=digest, max_bytes=wanted.max_bytes)
    if unit.type == "jsonl":
        end = unit.end if unit.parts > 1 else None
        return jsonl.read(path, source=source, file=file, start=unit.start, end=end, wanted=wanted, digest=digest)
    if unit.type in ("warc", "webdataset"):
        from data_prep.sources import warc, webdataset  # noqa: PLC0415 - few jobs need them

        read = warc.read if unit.type == "warc" else webdataset.read
        return read(path, source=source, file=file, wanted=wanted, digest=digest)
    if unit.type == "function":
        from data_prep.sources import own_reader  # noqa: PLC0415

        return own_reader.read(path, source=source, file=file, wanted=wanted)
    from data_prep.sources import hf, parquet  # noqa: PLC0415

    if unit.type == "parquet":
        groups = {"first_group": unit.first_group, "end_group": unit.end_group}
        return parquet.read(path, source=source, file=file, wanted=wanted, **groups)
    return hf.read(path, source=source, file=file, wanted=wanted)


def _check_unchanged(unit: Unit) -> None:
    try:
        found = storage.stat(unit.path)
    except FileNotFoundError:
        raise DataError(f"{unit.path} was removed after the job was planned\n  try: restore it and run again") from None
    planned = Stat(unit.file_bytes, unit.file_version)
    if found.differs_from(planned):
        sizes = f": it has {found.bytes:,} bytes, and had {planned.bytes:,}" if found.bytes != planned.bytes else ""
        raise DataError(
            f"{unit.path} has changed since the job was planned{sizes}\n"
            "  try: restore it, or remove the job directory to start over"
        )
