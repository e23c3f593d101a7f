"""From Arrow batches to documents: what parquet and `datasets` share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from data_prep.readers.records import Bad, Document
from headrace.errors import ConfigError


def check_schema(schema: Any, *, path: str, at: str, text_field: str, id_field: str | None) -> None:
    """Refuses a table without the columns that the config names.

    Raises:
        ConfigError: a column is missing, or the text column holds no strings.
    """
    for key, column in (("text_field", text_field), ("id_field", id_field)):
        if column is not None and column not in schema.names:
            raise ConfigError(f"{at}.{key}", column, why=f"{path} has no such column", remedy=", ".join(schema.names))
    kind = schema.field(text_field).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(plain) or pa.types.is_large_string(plain) or pa.types.is_string_view(plain)):
        strings = [f.name for f in schema if "string" in str(f.type)]
        remedy = f"columns of strings: {', '.join(strings) or 'none'}"
        raise ConfigError(f"{at}.text_field", text_field, why=f"the column in {path} holds {kind}", remedy=remedy)


def documents(
    batch: Any, *, first_row: int, source: str, file: str, text_field: str, id_field: str | None
) -> Iterator[Document | Bad]:
    """Yields the rows of a record batch, whose first row is row `first_row` of the file."""
    ids = batch.column(id_field) if id_field else None
    for i, cell in enumerate(batch.column(text_field)):
        row = first_row + i
        try:
            text = cell.as_py()
        except UnicodeDecodeError as error:
            yield Bad(source, file, "row", row, "not UTF-8", str(error))
            continue
        if text is None:
            yield Bad(source, file, "row", row, "text is not a string", f"'{text_field}' is null")
        elif ids is not None and ids[i].as_py() is None:
            yield Bad(source, file, "row", row, "no id", f"'{id_field}' is null")
        else:
            yield Document(f"{source}/{file}#{row}" if ids is None else f"{source}/{ids[i].as_py()}", text)
