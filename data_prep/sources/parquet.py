"""Parquet reader, by row groups; only the needed columns are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources import columns, storage
from data_prep.sources.bytesource import DamagedFileError
from data_prep.sources.records import DAMAGED_FILE, BadRecord, TextBatch, WantedFields
from foundation.storage import is_remote

_ROWS = 1024


def row_group_bytes(path: str) -> list[int]:
    """Compressed bytes of each row group; empty if the footer cannot be read (the reader reports the error)."""
    try:
        metadata = _open(path).metadata
    except DamagedFileError:
        return []
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return [sum(g.column(c).total_compressed_size for c in range(g.num_columns)) for g in groups]


def check(path: str, *, at: str, wanted: WantedFields) -> bool:
    """Reads the footer of a file and checks its columns (`columns.check_schema`).

    Raises:
        DamagedFileError: the footer is not readable.
        ConfigError: a column is missing or does not hold strings.
    """
    return columns.check_schema(_open(path).schema_arrow, path=path, at=at, wanted=wanted)


def read(
    path: str, *, source: str, file: str, first_group: int, end_group: int, wanted: WantedFields
) -> Iterator[TextBatch | BadRecord]:
    """Yields the rows of row groups [first_group, end_group).

    A row group with a page that cannot be decoded ends with a `BadRecord` with the reason `DAMAGED_FILE`, and reading
    continues with the next row group. Each row group is read separately: the result does not depend on the division
    into units.

    Raises:
        DamagedFileError: the footer is not readable.
    """
    table = _open(path)
    names = columns.present(table.schema_arrow, wanted)
    row = sum(table.metadata.row_group(i).num_rows for i in range(first_group))
    for group in range(first_group, end_group):
        at = row
        try:
            for batch in _batches(table, group, names):
                yield from columns.batches(batch, first_row=at, source=source, file=file, wanted=wanted)
                at += batch.num_rows
        except DamagedFileError as error:
            yield BadRecord(source, file, "row group", group, DAMAGED_FILE, str(error))
        row += table.metadata.row_group(group).num_rows


def _batches(table: Any, group: int, names: list[str]) -> Iterator[Any]:
    try:
        yield from table.iter_batches(_ROWS, row_groups=[group], columns=names, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(_first_line(error)) from None


def _open(path: str) -> Any:
    try:
        local = not is_remote(path)
        return pq.ParquetFile(storage.parquet_source(path), memory_map=local, page_checksum_verification=True)
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise DamagedFileError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
