"""Conversion of Arrow record batches to text batches, for the readers of parquet and `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from data_prep.sources.conversation import ConversationError, conversation_line
from data_prep.sources.records import BadRecord, TextBatch, WantedFields
from headrace.base.errors import ConfigError


def check_schema(schema: Any, *, path: str, at: str, wanted: WantedFields) -> None:
    """Checks that a table has the columns that the config names.

    Raises:
        ConfigError: a column is missing, or the text column does not hold strings.
    """
    text = "messages_field" if wanted.conversation else "text_field"
    for key, column in ((text, wanted.text), ("id_field", wanted.id), ("tools_field", wanted.tools)):
        if column is not None and column not in schema.names:
            raise ConfigError(
                f"{at}.{key}",
                column,
                why=f"{path} has no such column",
                remedy=f"its columns are: {', '.join(schema.names)}",
            )
    kind = schema.field(wanted.text).type
    if wanted.conversation:
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            why, remedy = (
                f"the column in {path} has the type {kind}",
                "name a column with a list of messages in each row",
            )
            raise ConfigError(f"{at}.messages_field", wanted.text, why=why, remedy=remedy)
        return
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(plain) or pa.types.is_large_string(plain) or pa.types.is_string_view(plain)):
        strings = [f.name for f in schema if "string" in str(f.type)]
        remedy = f"columns of strings: {', '.join(strings) or 'none'}"
        raise ConfigError(
            f"{at}.text_field", wanted.text, why=f"the column in {path} has the type {kind}", remedy=remedy
        )


def batches(
    batch: Any, *, first_row: int, source: str, file: str, wanted: WantedFields
) -> Iterator[TextBatch | BadRecord]:
    """Yields the rows of a record batch; its first row is row `first_row` of the file."""
    extra = {name: _cells(batch.column(name)) for name in wanted.extra if name in batch.schema.names}
    texts = _conversations(batch, wanted) if wanted.conversation else _cells(batch.column(wanted.text))
    pending = TextBatch()
    for i, text in enumerate(texts):
        problem = _row_problem(text, i, extra, wanted)
        if problem is not None:
            if pending.texts:
                yield pending
                pending = TextBatch()
            yield BadRecord(source, file, "row", first_row + i, *problem)
            continue
        if wanted.extra:
            pending.fields.append({name: extra[name][i] if name in extra else None for name in wanted.extra})
        if pending.add(text, first_row + i):
            yield pending
            pending = TextBatch()
    if pending.texts:
        yield pending


def _cells(column: Any) -> list[Any]:
    """The column's values: None for null, a `UnicodeDecodeError` for a string that is not UTF-8."""
    try:
        cells: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        cells = [_cell(cell) for cell in column]
    return cells


def _cell(cell: Any) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        return error


def _conversations(batch: Any, wanted: WantedFields) -> list[Any]:
    """Conversations as lines of JSON; an exception for a row that is not one."""
    tools = [None] * batch.num_rows if wanted.tools is None else _cells(batch.column(wanted.tools))
    return [_conversation(*cells) for cells in zip(_cells(batch.column(wanted.text)), tools, strict=True)]


def _conversation(messages: Any, tools: Any) -> Any:
    for cell in (messages, tools):
        if isinstance(cell, UnicodeDecodeError):
            return cell
    try:
        return conversation_line(messages, tools)
    except (ConversationError, TypeError) as error:
        return error


def _row_problem(text: Any, row: int, extra: dict[str, list[Any]], wanted: WantedFields) -> tuple[str, str] | None:
    """Reason and detail if the row cannot be used, else None."""
    if isinstance(text, UnicodeDecodeError):
        return "not UTF-8", str(text)
    if extra:  # checked per row, and most sources have no extra columns
        for name, column in extra.items():
            if isinstance(column[row], UnicodeDecodeError):
                return "not UTF-8", f"'{name}': {column[row]}"
    if wanted.conversation and not isinstance(text, str):
        return "not a conversation", str(text)
    if text is None:
        return "text is not a string", f"'{wanted.text}' is null"
    if wanted.id is not None and extra[wanted.id][row] is None:
        return "no id", f"'{wanted.id}' is null"
    return None
