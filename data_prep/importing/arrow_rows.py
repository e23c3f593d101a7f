"""Rows of Arrow and Parquet with a list of ids: files of `datasets.save_to_disk`, and Parquet files.

A label belongs to its own position, since Hugging Face's models shift labels themselves. Padding (attention_mask 0) is
dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.importing.columns import ATTENTION, IGNORED, LABELS, LOSS_MASKS, find_ids
from data_prep.importing.documents import Array, Documents
from foundation.errors import DataError
from foundation.foreign_folders import file_beside
from foundation.foreign_json import read_json

STATE = "state.json"
_ROWS = 1024


@dataclass(frozen=True)
class ArrowRows:
    """A file of rows.

    Attributes:
        path: a .parquet file, or a .arrow file of Arrow's stream format.
        columns: names of the columns to read: first the ids, then loss and padding.
    """

    path: Path
    columns: tuple[str, ...]

    @property
    def masked(self) -> bool:
        """Implements `TokenSource`."""
        return any(name in (LABELS, *LOSS_MASKS) for name in self.columns)

    def read(self) -> Iterator[Documents]:
        """Implements `TokenSource`."""
        row = 0
        try:
            for batch in self._batches():
                yield self._documents(batch, row)
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.path} is damaged after row {row}: {error}\n  try: write it again") from None

    def _batches(self) -> Iterator[Any]:
        if self.path.suffix == ".parquet":
            yield from pq.ParquetFile(self.path).iter_batches(batch_size=_ROWS, columns=list(self.columns))
            return
        with pa.memory_map(str(self.path)) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                taken = batch.select(list(self.columns))
                for start in range(0, taken.num_rows, _ROWS):
                    yield taken.slice(start, _ROWS)

    def _documents(self, batch: Any, row: int) -> Documents:
        ids, lengths = self._values(batch, self.columns[0], row)
        mask: Array | None = None
        for name in self.columns[1:]:
            values, sizes = self._values(batch, name, row)
            if not np.array_equal(sizes, lengths):
                at = int(np.flatnonzero(sizes != lengths)[0])
                why = f"row {row + at} has {lengths[at]} ids and {sizes[at]} values of {name}"
                raise DataError(f"{self.path}: {why}\n  try: write it again, or without {name}")
            if name == ATTENTION:
                continue
            counts = self._with_loss(values, ids, lengths, row) if name == LABELS else values != 0
            mask = counts if mask is None else mask & counts
        if ATTENTION in self.columns:
            kept = self._values(batch, ATTENTION, row)[0] != 0
            ends = np.cumsum(lengths)
            before = np.concatenate([[0], np.cumsum(kept)])
            ids, lengths = ids[kept], before[ends] - before[ends - lengths]
            mask = None if mask is None else mask[kept]
        return Documents(ids, lengths, None if mask is None else mask.astype(np.uint8))

    def _with_loss(self, labels: Array, ids: Array, lengths: Array, row: int) -> Array:
        counts: Array = labels != IGNORED
        wrong = np.flatnonzero(counts & (labels != ids))
        if wrong.size:
            at = row + int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
            why = (
                f"row {at} has the label {labels[wrong[0]]} for the id {ids[wrong[0]]}: labels are {IGNORED} or the id"
            )
            raise DataError(f"{self.path}: {why} of the same position\n  try: write labels that are not shifted")
        return counts

    def _values(self, batch: Any, name: str, row: int) -> tuple[Array, Array]:
        column = batch.column(name)
        values = pc.list_flatten(column)
        if column.null_count or values.null_count:
            raise DataError(f"{self.path}: rows {row} to {row + batch.num_rows - 1} have nulls in {name}")
        return values.to_numpy(zero_copy_only=False), pc.list_value_length(column).to_numpy().astype(np.int64)


def open_parquet(path: Path) -> tuple[ArrowRows, list[str]]:
    """Checks the schema of a Parquet file; also returns the names of columns that are not read.

    Raises:
        DataError: the footer is damaged, or no column holds lists of ids.
    """
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged: {error}\n  try: write or copy it again") from None
    return _with_columns(path, schema)


def open_saved(folder: Path) -> tuple[list[ArrowRows], list[str]]:
    """Opens a folder of `save_to_disk`: its files in order, and the names of columns that are not read.

    Raises:
        DataError: its state is damaged, a file is missing or damaged, or no column holds lists of ids.
    """
    state = folder / STATE
    try:
        saved = read_json(state)
        paths = [file_beside(state, each["filename"]) for each in saved["_data_files"]]
        indices = saved.get("_indices_data_files") or saved.get("_indices_files")
    except (OSError, KeyError, TypeError) as error:
        raise DataError(f"{state} is damaged: {error!r}\n  try: save_to_disk again") from None
    if indices:
        raise DataError(f"{state} selects rows by indices, as old versions did\n  try: flatten_indices(), save again")
    found, others = [], list[str]()
    for path in paths:
        try:
            with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
                rows, others = _with_columns(path, stream.schema)
        except FileNotFoundError:
            raise DataError(f"{path} is missing, and {state} lists it\n  try: save_to_disk again") from None
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is damaged: {error}\n  try: save_to_disk again") from None
        found.append(rows)
    return found, others


def _with_columns(path: Path, schema: Any) -> tuple[ArrowRows, list[str]]:
    ids = find_ids(schema.names, path)
    lists = {
        field.name
        for field in schema
        if (
            pa.types.is_list(field.type)
            or pa.types.is_large_list(field.type)
            or pa.types.is_fixed_size_list(field.type)
        )
        and (pa.types.is_integer(field.type.value_type) or pa.types.is_boolean(field.type.value_type))
    }
    if ids not in lists:
        raise DataError(f"{path}: column {ids} is of {schema.field(ids).type}, not lists of integers\n  try: cast it")
    known = [name for name in (LABELS, *LOSS_MASKS, ATTENTION) if name in lists]
    return ArrowRows(path, (ids, *known)), [name for name in schema.names if name not in (ids, *known)]
