"""Reader of Arrow IPC: files (Feather is one) and streams, in which Hugging Face `datasets` saves its data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from data_prep.sources import columns, storage
from data_prep.sources.bytesource import DamagedFileError
from data_prep.sources.magic import HEAD_BYTES, described
from data_prep.sources.records import BadRecord, TextBatch, WantedFields

_FILE, _STREAM = b"ARROW1", b"\xff\xff\xff\xff"


def check(path: str, *, at: str, wanted: WantedFields) -> bool:
    """Reads the schema of a file and checks its columns, see `columns.check_schema`.

    Raises:
        DamagedFileError: the schema is not readable.
        ConfigError: a column is missing or does not hold strings.
    """
    return columns.check_schema(_open(path).schema, path=path, at=at, wanted=wanted)


def read(path: str, *, source: str, file: str, wanted: WantedFields) -> Iterator[TextBatch | BadRecord]:
    """Yields the rows of one Arrow file.

    Raises:
        DamagedFileError: the file is truncated; for a stream, the rows before the damage have been yielded.
    """
    row = 0
    names: list[str] | None = None
    for batch in _record_batches(_open(path)):
        if names is None:
            found = columns.present(batch.schema, wanted)
            names = list(dict.fromkeys(n if n in batch.schema.names else n.split(".")[0] for n in found))
        yield from columns.batches(batch.select(names), first_row=row, source=source, file=file, wanted=wanted)
        row += batch.num_rows


def _open(path: str) -> Any:
    """Opens a reader of a stream, or of a file, which ends with a list of its record batches."""
    with storage.open_raw(path) as file:
        head = file.read(HEAD_BYTES)
    try:
        source = storage.parquet_source(path)
        opened = pa.memory_map(path) if source is path else pa.PythonFile(source, mode="r")
        return (pa.ipc.open_file if head.startswith(_FILE) else pa.ipc.open_stream)(opened)
    except (pa.ArrowInvalid, OSError) as error:
        what = None if head.startswith((_FILE, _STREAM)) else described(head, path)
        raise DamagedFileError(f"not Arrow IPC but {what}" if what else str(error)) from None


def _record_batches(reader: Any) -> Iterator[Any]:
    try:
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from reader
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(str(error)) from None
