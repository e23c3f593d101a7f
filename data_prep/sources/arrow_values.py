"""Converts Arrow values to JSON: columns of JSON, maps, and structs that have other rows' fields as nulls."""

from __future__ import annotations

from typing import Any

import orjson
import pyarrow as pa


def is_json(kind: Any) -> bool:
    """Whether a type is `arrow.json`, in which `datasets` stores its features `Json` and `List(Json)`."""
    return getattr(kind, "extension_name", None) == "arrow.json"


def is_list(kind: Any) -> bool:
    """Whether a type is one of Arrow's lists."""
    types = pa.types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def is_text(kind: Any) -> bool:
    """Whether a type is one of Arrow's strings, or of bytes, which are decoded as UTF-8."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    types = pa.types
    strings = types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain)
    return bool(strings or types.is_binary(plain) or types.is_large_binary(plain) or types.is_binary_view(plain))


def holds_objects(kind: Any) -> bool:
    """Whether a column of this type holds lists of objects, such as messages."""
    item = kind.value_type if is_list(kind) else None
    return is_json(kind) or (item is not None and (pa.types.is_struct(item) or pa.types.is_map(item) or is_json(item)))


def may_be_messages(kind: Any) -> bool:
    """Whether a column of this type can hold a list of messages, which may be written as strings of JSON."""
    return holds_objects(kind) or is_text(kind.value_type if is_list(kind) else kind)


def has_optional_keys(kind: Any, *, depth: int = 0) -> bool:
    """Whether rows of this type may lack keys: a struct has the fields of all rows, null where a row lacks the key."""
    if is_list(kind):
        return has_optional_keys(kind.value_type, depth=depth)
    if not pa.types.is_struct(kind):
        return False
    names = {kind.field(i).name for i in range(kind.num_fields)}
    return bool(depth or names - {"role", "content", "from", "value"})


def json_value(value: Any, kind: Any, *, keep: frozenset[str] = frozenset()) -> Any:
    """Converts a value of `to_pylist` to the JSON that it stands for.

    JSON text is parsed, a map becomes an object, and null fields of structs are left out: a struct has the fields of
    all rows of a file, which are null in rows that never had these keys.

    Args:
        value: value of the type `kind`.
        kind: Arrow type of the value.
        keep: names of fields that stay even if null, in structs that are not nested.

    Raises:
        ValueError: JSON text is not valid.
    """
    if value is None:
        return None
    if is_json(kind):
        return orjson.loads(value)
    if is_list(kind):
        return [json_value(item, kind.value_type, keep=keep) for item in value]
    if pa.types.is_map(kind):
        return {key: json_value(item, kind.item_type) for key, item in value}
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        found = {field.name: json_value(value[field.name], field.type) for field in fields}
        return {name: item for name, item in found.items() if item is not None or name in keep}
    return value
