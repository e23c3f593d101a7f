"""Reading a unit of the plan, whatever its type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data_prep.config.corpus import Source
from data_prep.sources import jsonl, storage, text
from data_prep.sources.bytesource import DamagedFileError, Digest
from data_prep.sources.records import DAMAGED_FILE, BadRecord, TextBatch, WantedFields
from data_prep.sources.units import Unit
from headrace.base.errors import DataError


def wanted_of(source: Source, others: Sequence[str] = ()) -> WantedFields:
    """What is read of the records of a source: its text, its id, and what the job asks for besides."""
    if source.messages_field is not None:
        return WantedFields(
            source.messages_field, source.id_field, tuple(others), conversation=True, tools=source.tools_field
        )
    return WantedFields(source.text_field, source.id_field, tuple(others))


def digest_of(unit: Unit) -> Digest:
    """The sum of the bytes that a unit answers for, still to be taken."""
    return Digest(unit.path, start=unit.start, end=unit.end)


def read_unit(unit: Unit, wanted: WantedFields, digest: Digest | None = None) -> Iterator[TextBatch | BadRecord]:
    """Yields the documents of a unit, and what was not readable.

    A damaged file, or row group of a parquet file, ends with a `BadRecord` of the reason `DAMAGED_FILE`; what was read
    before the damage stands.

    Args:
        digest: of the unit; is shown the bytes that are read.

    Raises:
        DataError: the file is not the one that was planned: it is gone, or has changed; or its storage fails.
    """
    _check_same(unit)
    try:
        yield from _batches(unit, wanted, digest or digest_of(unit))
    except DamagedFileError as error:
        yield BadRecord(unit.source, unit.file, "file", None, DAMAGED_FILE, str(error))
    except (
        OSError,
        storage.StorageError,
    ):  # a remote file that was replaced refuses to be read on, in its storage's words
        _check_same(unit)
        raise
    _check_same(unit)


def _batches(unit: Unit, wanted: WantedFields, digest: Digest) -> Iterator[TextBatch | BadRecord]:
    path, source, file = unit.path, unit.source, unit.file
    if unit.type == "text":
        return text.read(path, source=source, file=file, digest=digest)
    if unit.type == "jsonl":
        end = unit.end if unit.parts > 1 else None
        return jsonl.read(path, source=source, file=file, start=unit.start, end=end, wanted=wanted, digest=digest)
    from data_prep.sources import hf, parquet  # noqa: PLC0415

    if unit.type == "parquet":
        groups = {"first_group": unit.first_group, "end_group": unit.end_group}
        return parquet.read(path, source=source, file=file, wanted=wanted, **groups)
    return hf.read(path, source=source, file=file, wanted=wanted)


def _check_same(unit: Unit) -> None:
    try:
        found = storage.stat(unit.path)
    except FileNotFoundError:
        raise DataError(f"{unit.path} has gone since the job was planned\n  try: bring it back and run again") from None
    planned = storage.Stat(unit.file_bytes, unit.file_version)
    if found.is_another(planned):
        sizes = f": {found.bytes:,} bytes, and had {planned.bytes:,}" if found.bytes != planned.bytes else ""
        raise DataError(
            f"{unit.path} has changed since the job was planned{sizes}\n"
            "  try: restore it, or remove the job directory to start over"
        )
