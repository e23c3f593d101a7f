"""Conversion of Arrow record batches to text batches, for the readers of parquet and `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_prep.hashing import utf8_size
from data_prep.sources.arrow_values import (
    has_optional_keys,
    holds_objects,
    is_json,
    is_text,
    json_value,
    may_be_messages,
)
from data_prep.sources.conversation import conversation_hint, conversation_line, prompt_and_answer
from data_prep.sources.records import TOO_LONG, BadRecord, TextBatch, WantedFields, too_long
from foundation.errors import ConfigError


def check_schema(schema: Any, *, path: str, at: str, wanted: WantedFields) -> bool:
    """Checks that a table has the columns that the config names.

    Returns:
        Whether a null in a struct of a conversation counts as a key that the row lacks.

    Raises:
        ConfigError: a column is missing or its name is ambiguous, the text column holds neither strings nor bytes nor
            JSON, or the messages column holds no lists.
    """
    text = "messages_field" if wanted.conversation else "text_field"
    said = [*wanted.prompt, wanted.text]
    named = [*((text, name) for name in said), ("id_field", wanted.id), ("tools_field", wanted.tools)]
    for key, column in named:
        if column is not None and _field(schema, column) is None:
            hint = "" if wanted.conversation else conversation_hint(schema.names)
            remedy = f"its columns are: {', '.join(_names(schema))}{hint}"
            raise ConfigError(f"{at}.{key}", column, why=f"{path} has no such column", remedy=remedy)
    for key, column in named:
        if column is not None and schema.names.count(column) > 1:
            why = f"{path} has {schema.names.count(column)} columns of this name"
            raise ConfigError(f"{at}.{key}", column, why=why, remedy="rename the columns, or name another one")
    for name in said:
        _check_type(schema, name, path=path, at=f"{at}.{text}", wanted=wanted)
    kind = _field(schema, wanted.text).type
    tools = wanted.conversation and wanted.tools is not None and _field(schema, wanted.tools).type
    return wanted.conversation and (has_optional_keys(kind) or (tools and has_optional_keys(tools, depth=1)))


def _check_type(schema: Any, name: str, *, path: str, at: str, wanted: WantedFields) -> None:
    """Checks that a column can hold texts, or messages."""
    kind = _field(schema, name).type
    fits, best, what = (_may_be_text, is_text, "of strings")
    if wanted.conversation:
        fits, best, what = (may_be_messages, holds_objects, "of messages")
    if not fits(kind):
        fitting = [other for other in _names(schema) if best(_field(schema, other).type)]
        remedy = f"columns {what}: {', '.join(fitting) or 'none'}"
        raise ConfigError(at, name, why=f"the column in {path} has the type {kind}", remedy=remedy)


def _may_be_text(kind: Any) -> bool:
    return is_text(kind) or is_json(kind)


def present(schema: Any, wanted: WantedFields) -> list[str]:
    """The wanted columns that a table has once, including paths into structs such as `meta.text`."""
    return [name for name in wanted.columns if schema.names.count(name) <= 1 and _field(schema, name) is not None]


def _field(schema: Any, name: str) -> Any:
    """The field for a column's name, or for a path through structs; None if there is none."""
    if name in schema.names:
        return schema.field(schema.names.index(name))
    first, *path = name.split(".")
    if not path or schema.names.count(first) != 1:
        return None
    field = schema.field(first)
    for part in path:
        if not pa.types.is_struct(field.type) or field.type.get_field_index(part) < 0:
            return None
        field = field.type.field(part)
    return field


def _names(schema: Any) -> list[str]:
    """Names of all columns, with structs replaced by their fields."""
    found: list[str] = []
    waiting = [(field.name, field.type) for field in reversed(schema)]
    while waiting:
        name, kind = waiting.pop()
        if pa.types.is_struct(kind) and kind.num_fields:
            waiting += [(f"{name}.{kind.field(i).name}", kind.field(i).type) for i in reversed(range(kind.num_fields))]
        else:
            found.append(name)
    return found


def _column(batch: Any, name: str) -> Any:
    """A column of a batch by its name, or by a path through structs."""
    if name in batch.schema.names:
        return batch.column(name)
    first, *path = name.split(".")
    column = batch.column(first)
    for part in path:
        column = pc.struct_field(column, part)  # null where the struct is null
    return column


def batches(
    batch: Any, *, first_row: int, source: str, file: str, wanted: WantedFields
) -> Iterator[TextBatch | BadRecord]:
    """Yields the rows of a record batch, the first of which is row `first_row` of the file."""
    extra = {n: _cells(_column(batch, n)) for n in wanted.extra if _field(batch.schema, n) is not None}
    texts = _conversations(batch, wanted) if wanted.conversation else _texts(_column(batch, wanted.text))
    pending = TextBatch()
    for i, text in enumerate(texts):
        problem = _row_problem(text, i, extra, wanted) or _length_problem(text, wanted)
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


def _texts(column: Any) -> list[Any]:
    """The column's values, like `_cells`; bytes are decoded as UTF-8."""
    return [_decoded(cell) if isinstance(cell, bytes) else cell for cell in _cells(column)]


def _decoded(cell: bytes) -> str | UnicodeDecodeError:
    try:
        return cell.decode()
    except UnicodeDecodeError as error:
        return error


def _cells(column: Any) -> list[Any]:
    """The column's values: None for null, a `ValueError` for a string that is not UTF-8 or for invalid JSON."""
    cells = _raw_cells(column)
    return [_json_cell(cell, column.type) for cell in cells] if is_json(column.type) else cells


def _raw_cells(column: Any) -> list[Any]:
    try:
        cells: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        cells = [_cell(cell) for cell in column]
    return cells


def _json_cell(cell: Any, kind: Any) -> Any:
    try:
        return cell if isinstance(cell, UnicodeDecodeError) else json_value(cell, kind)
    except ValueError as error:
        return error


def _cell(cell: Any) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        return error


def _conversations(batch: Any, wanted: WantedFields) -> list[Any]:
    """Conversations as lines of JSON; an exception for a row without a conversation."""
    said = [_column(batch, name) for name in (*wanted.prompt, wanted.text)]
    tools = pa.nulls(batch.num_rows) if wanted.tools is None else _column(batch, wanted.tools)
    kinds = [column.type for column in (*said, tools)]
    return [_conversation(row, kinds) for row in zip(*map(_raw_cells, (*said, tools)), strict=True)]


def _conversation(row: tuple[Any, ...], kinds: list[Any]) -> Any:
    """The line for a row of prompt fields (if any), messages or answer, and tools; an exception if the row has none."""
    for cell in row:
        if isinstance(cell, UnicodeDecodeError):
            return cell
    try:
        *prompt, messages = (json_value(cell, kind, keep=_ALWAYS) for cell, kind in zip(row[:-1], kinds, strict=False))
        if prompt:
            messages = prompt_and_answer(prompt, messages)
        return conversation_line(messages, json_value(row[-1], kinds[-1]))
    except (ValueError, TypeError) as error:  # includes ConversationError
        return error


_ALWAYS = frozenset({"content"})
"""Field that stays even if null: templates test it, and it is null where the assistant only calls tools."""


def _length_problem(text: str, wanted: WantedFields) -> tuple[str, str] | None:
    limit = wanted.max_bytes
    if limit is None or 4 * len(text) <= limit or (size := utf8_size(text)) <= limit:
        return None
    return TOO_LONG, too_long(f"{size:,} bytes", limit=limit)


def _row_problem(text: Any, row: int, extra: dict[str, list[Any]], wanted: WantedFields) -> tuple[str, str] | None:
    """Reason and detail if the row cannot be used, else None."""
    if not isinstance(text, str):
        return _text_problem(text, wanted)
    if extra:  # checked per row; most sources have no extra columns
        for name, column in extra.items():
            if isinstance(column[row], UnicodeDecodeError):
                return "not UTF-8", f"'{name}': {column[row]}"
    if wanted.id is not None and extra[wanted.id][row] is None:
        return "no id", f"'{wanted.id}' is null"
    return None


def _text_problem(text: Any, wanted: WantedFields) -> tuple[str, str]:
    if isinstance(text, UnicodeDecodeError):
        return "not UTF-8", str(text)
    if wanted.conversation:
        return "not a conversation", str(text)
    if isinstance(text, ValueError):
        return "not JSON", str(text)
    kind = "null" if text is None else f"a {type(text).__name__}"
    return "text is not a string", f"'{wanted.text}' is {kind}"
