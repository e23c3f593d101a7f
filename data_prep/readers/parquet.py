"""Parquet files, by row groups; only the text and id columns are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep import storage
from data_prep.readers import columns
from data_prep.readers.bytesource import DamagedFileError
from data_prep.readers.records import Bad, Batch, Wanted

_ROWS = 1024


def row_group_bytes(path: str) -> list[int]:
    """Compressed bytes of each row group; empty when the footer cannot be read (the reader will say why)."""
    try:
        metadata = _open(path).metadata
    except DamagedFileError:
        return []
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return [sum(g.column(c).total_compressed_size for c in range(g.num_columns)) for g in groups]


def check(path: str, *, at: str, wanted: Wanted) -> None:
    """Reads the footer and refuses a file without the columns.

    Raises:
        DamagedFileError: no readable footer. ConfigError: a column is missing or holds no strings.
    """
    columns.check_schema(_open(path).schema_arrow, path=path, at=at, wanted=wanted)


def read(
    path: str, *, source: str, file: str, first_group: int, end_group: int, wanted: Wanted
) -> Iterator[Batch | Bad]:
    """Yields the rows of row groups [first_group, end_group).

    Raises:
        DamagedFileError: the file cannot be decoded from some row group on; the rows before have been yielded.
    """
    table = _open(path)
    row = sum(table.metadata.row_group(i).num_rows for i in range(first_group))
    names = [name for name in wanted.columns if name in table.schema_arrow.names]
    rows = table.iter_batches(_ROWS, row_groups=range(first_group, end_group), columns=names, use_threads=False)
    while (batch := _next(rows)) is not None:
        yield from columns.batches(batch, first_row=row, source=source, file=file, wanted=wanted)
        row += batch.num_rows


def _open(path: str) -> Any:
    try:
        return pq.ParquetFile(storage.parquet_source(path), memory_map=not storage.is_remote(path))
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise DamagedFileError(_first_line(error)) from None


def _next(batches: Iterator[Any]) -> Any:
    try:
        return next(batches, None)
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
