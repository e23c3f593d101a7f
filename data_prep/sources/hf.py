"""Reader of saved Hugging Face `datasets`: the Arrow stream files that `saved.saved_files` lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from data_prep.sources import columns, storage
from data_prep.sources.bytesource import DamagedFileError
from data_prep.sources.records import BadRecord, TextBatch, WantedFields


def check(path: str, *, at: str, wanted: WantedFields) -> bool:
    """Reads the schema of a file and checks its columns, see `columns.check_schema`.

    Raises:
        DamagedFileError: the schema is not readable.
        ConfigError: a column is missing or does not hold strings.
    """
    return columns.check_schema(_open(path).schema, path=path, at=at, wanted=wanted)


def read(path: str, *, source: str, file: str, wanted: WantedFields) -> Iterator[TextBatch | BadRecord]:
    """Yields the rows of one Arrow stream file.

    Raises:
        DamagedFileError: the stream is truncated; the rows before the damage have been yielded.
    """
    stream, row = _open(path), 0
    names: list[str] | None = None
    while (batch := _next(stream)) is not None:
        if names is None:
            found = columns.present(batch.schema, wanted)
            names = list(dict.fromkeys(n if n in batch.schema.names else n.split(".")[0] for n in found))
        yield from columns.batches(batch.select(names), first_row=row, source=source, file=file, wanted=wanted)
        row += batch.num_rows


def _open(path: str) -> Any:
    try:
        source = storage.parquet_source(path)
        return pa.ipc.open_stream(pa.memory_map(path) if source is path else pa.PythonFile(source, mode="r"))
    except (pa.ArrowInvalid, OSError) as error:
        raise DamagedFileError(str(error)) from None


def _next(stream: Any) -> Any:
    try:
        return stream.read_next_batch()
    except StopIteration:
        return None
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(str(error)) from None
