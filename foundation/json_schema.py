"""JSON Schema (draft 2020-12) of a config class, and words for what its nodes allow.

The schema is pydantic's, without the titles and class names that mean nothing to a user. Error messages, `headrace
explain`, the reference page and editor completion all come from it: they cannot differ.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

Node = Mapping[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
UNKNOWN_TEXT = "..."
"""Example for a text key whose description has none."""
NO_DEFAULT = object()
"""Placeholder for the default of a required key or a section, which have none."""


@cache
def schema_of(section: type[BaseModel]) -> Node:
    """The JSON Schema of a config class, with `$defs` for its sections."""
    schema: dict[str, Any] = section.model_json_schema()
    return {name: _polished(value, is_node=name != "$defs") for name, value in schema.items() if name != "title"}


def for_editors(section: type[BaseModel], *, title: str, auto: bool = False) -> dict[str, Any]:
    """The schema of a whole config file, which may extend another one.

    A required key may be in the extended file. So only objects in lists, which are always replaced as a whole, keep
    their required keys.

    Args:
        section: config class of the file.
        title: title of the schema.
        auto: whether any value may be "auto", which leaves the key out.
    """
    schema: dict[str, Any] = copy.deepcopy(dict(schema_of(section)))
    in_lists = set(re.findall(r'"#/\$defs/(\w+)"', json.dumps([node["items"] for node in _nodes(schema, "items")])))
    schema.pop("required", None)
    for name, definition in schema.get("$defs", {}).items():
        if name not in in_lists:
            definition.pop("required", None)
    for holder in list(_nodes(schema, "properties")) if auto else ():
        holder["properties"] = {name: _or_auto(node) for name, node in holder["properties"].items()}
    own = {
        "$schema": {"type": "string", "description": "this schema; ignored when the file is read"},
        "extends": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            "description": "config files, relative to this one, that this one builds on; its own keys win",
        },
    }
    return {"$schema": DIALECT, "title": title, **schema, "properties": {**own, **schema["properties"]}}


@dataclass(frozen=True)
class Key:
    """A key of a config file.

    Attributes:
        path: dotted path, with `[]` after a list and `[NAME]` for a variant of its objects: `data.sources[].weight`.
        node: schema of the key.
        schema: the whole schema, to follow references in `node`.
        required: whether the key must be given in its section.
    """

    path: str
    node: Node
    schema: Node
    required: bool

    @property
    def is_section(self) -> bool:
        """Whether the key holds an object with keys of its own, or a list of them."""
        return bool(_children(self.node, self.schema))

    @property
    def description(self) -> str:
        """The meaning of the key; for a section without a description, the description of its objects."""
        return str(self.node.get("description") or self.section_text)

    @property
    def section_text(self) -> str:
        """The description of the objects that the key holds; empty if there are none or several kinds."""
        texts = [str(child.get("description", "")) for _, child in _children(self.node, self.schema)]
        return texts[0] if len(texts) == 1 else ""

    @property
    def default(self) -> object:
        """The key's default, or `NO_DEFAULT`."""
        given = self.node.get("default", NO_DEFAULT)
        return NO_DEFAULT if self.is_section and given is not None else given

    @property
    def wanted(self) -> str:
        """The allowed values, in words."""
        return wanted(self.node, self.schema)

    @property
    def example(self) -> object:
        """An allowed value."""
        return example(self.node, self.schema)


def keys_of(schema: Node) -> Iterator[Key]:
    """All keys, depth first, in the order of their declaration."""
    yield from _keys("", schema, schema)


def node_at(schema: Node, loc: Sequence[str]) -> Node | None:
    """The node at a location (keys and list indices); None if there is none."""
    nodes: list[Node] = [schema]
    for part in loc:
        nodes = [child for node in nodes for child in _step(node, part, schema)]
    return nodes[0] if nodes else None


def keys_at(schema: Node, loc: Sequence[str]) -> list[str]:
    """The keys that an object at a location may have."""
    node = node_at(schema, loc)
    return [key for each in _alternatives(node, schema) for key in each.get("properties", {})] if node else []


def wanted(node: Node, schema: Node) -> str:
    """Describes the values that a node allows, e.g. "a whole number, at least 1, or null"."""
    alternatives = _alternatives(node, schema)
    if len(alternatives) > 1:
        words = dict.fromkeys(wanted(each, schema) for each in alternatives)
        return ", or ".join(sorted(words, key=lambda word: word == "null"))
    node = alternatives[0] if alternatives else node
    if "const" in node or "enum" in node:
        return _choice([node["const"]] if "const" in node else node["enum"])
    kind = node.get("type")
    if kind in ("integer", "number"):
        return _number(node)
    if kind in ("array", "object"):
        return _list(node, schema) if kind == "array" else _object(node, schema)
    string = "text that is not empty" if node.get("minLength") else "text"
    return {"string": string, "boolean": "true or false", "null": "null"}.get(str(kind), "any value")


def example(node: Node, schema: Node) -> object:
    """A value that a node allows: a stated example ("e.g. ..."), a choice, the default, or any value of its type."""
    if "examples" in node:
        return node["examples"][0]
    alternatives = [each for each in _alternatives(node, schema) if each.get("type") != "null"] or [node]
    stated = re.search(r"\be\.g\. (?=\S)", str(node.get("description", "")))
    if stated:
        value = _value_at(node["description"], stated.end())
        if isinstance(value, float) and any(each.get("type") == "integer" for each in alternatives):
            value = int(value)
        if any(_fits(value, each) for each in alternatives):
            return value
    first, default = alternatives[0], node.get("default")
    if "enum" in first:
        return next((choice for choice in first["enum"] if choice != default), default)
    if isinstance(default, bool):
        return not default
    if default not in (None, [], {}):
        return default
    return _example_of_type(first, schema)


def given(value: object) -> str:
    """Names the type of a value in the words of JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    number = {int: "a whole number", float: "a number with a fraction"}
    names: dict[type, str] = {**number, str: "text", list: "a list", dict: "an object"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), type(value).__name__)


def as_json(value: object) -> str:
    """Formats a value as one line of JSON."""
    return json.dumps(value, ensure_ascii=False)


def _polished(node: Any, *, is_node: bool = True) -> Any:
    """Drops titles, discriminators and the defaults of sections, which repeat the sections' keys."""
    if isinstance(node, list):
        return [_polished(item) for item in node]
    if not isinstance(node, dict):
        return node
    hidden = {"title", "discriminator"} if is_node else set()
    if is_node and "$ref" in node:
        hidden.add("default")
    kept = {name: value for name, value in node.items() if name not in hidden}
    if is_node and isinstance(kept.get("description"), str):
        kept["description"] = " ".join(kept["description"].split())
    return {
        name: value
        if is_node and name in ("default", "enum", "const")
        else _polished(value, is_node=name != "properties")
        for name, value in kept.items()
    }


def _or_auto(node: Node) -> Node:
    outside = {name: node[name] for name in ("description", "default") if name in node}
    inside = {name: value for name, value in node.items() if name not in outside}
    if "$ref" in inside or "properties" in inside or inside.get("type") == "string":
        return node
    branches = inside["anyOf"] if list(inside) == ["anyOf"] else [inside]
    return {**outside, "anyOf": [*branches, {"const": "auto"}]}


def _nodes(node: Any, key: str) -> Iterator[Any]:
    """All nodes of a schema that have a key."""
    if isinstance(node, dict):
        if key in node:
            yield node
        for value in node.values():
            yield from _nodes(value, key)
    elif isinstance(node, list):
        for item in node:
            yield from _nodes(item, key)


def _resolved(node: Node, schema: Node) -> Node:
    """The node that a reference names."""
    if "$ref" not in node:
        return node
    found: Node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    return found


def _alternatives(node: Node, schema: Node) -> list[Node]:
    node = _resolved(node, schema)
    branches = node.get("anyOf") or node.get("oneOf")
    if not branches:
        return [node]
    return [each for branch in branches for each in _alternatives(branch, schema)]


def _children(node: Node, schema: Node) -> list[tuple[str, Node]]:
    """The objects with their own keys that a node may hold, each with its path suffix, e.g. `[]`."""
    found = []
    for each in _alternatives(node, schema):
        if "properties" in each:
            found.append(("", each))
        elif each.get("type") == "array":
            found += [
                (_variant(item), item) for item in _alternatives(each.get("items", {}), schema) if "properties" in item
            ]
    return found


def _variant(item: Node) -> str:
    """Returns `[]`, or e.g. `[c4]` for an object that a constant key distinguishes."""
    constants = [value["const"] for value in item["properties"].values() if "const" in value]
    return f"[{constants[0]}]" if constants else "[]"


def _keys(path: str, holder: Node, schema: Node) -> Iterator[Key]:
    for name, node in holder["properties"].items():
        key = Key(f"{path}.{name}" if path else name, node, schema, name in holder.get("required", ()))
        yield key
        for suffix, child in _children(node, schema):
            yield from _keys(key.path + suffix, child, schema)


def _step(node: Node, part: str, schema: Node) -> Iterator[Node]:
    for each in _alternatives(node, schema):
        if part in each.get("properties", {}):
            yield each["properties"][part]
        elif each.get("type") == "array" and part.isdigit():
            inner = each.get("prefixItems", [])
            yield inner[int(part)] if int(part) < len(inner) else each.get("items", {})
        elif each.get("type") == "object" and isinstance(each.get("additionalProperties"), dict):
            yield each["additionalProperties"]


def _choice(values: Sequence[object]) -> str:
    words = [as_json(value) for value in values]
    return words[0] if len(words) == 1 else f"one of {', '.join(words)}"


def _number(node: Node) -> str:
    words = ["a whole number" if node["type"] == "integer" else "a number"]
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    if node["type"] == "integer" and above is not None:
        low, above = above + 1, None
    bounds = {"at least": low, "above": above, "at most": node.get("maximum"), "below": node.get("exclusiveMaximum")}
    words += [f"{word} {_plain(bound)}" for word, bound in bounds.items() if bound is not None]
    return f"{words[0]}, {' and '.join(words[1:])}" if words[1:] else words[0]


def _plain(number: float) -> str:
    return f"{int(number):,}" if number == int(number) else f"{number:g}"


def _list(node: Node, schema: Node) -> str:
    if "prefixItems" in node:
        return f"a list of {len(node['prefixItems'])} numbers"
    inner = node.get("items", {})
    plural = {"string": "texts", "integer": "whole numbers", "number": "numbers"}
    kind = "objects" if _children(node, schema) else plural.get(str(_resolved(inner, schema).get("type")), "values")
    return f"a list of {kind}{', not empty' if node.get('minItems') else ''}"


def _object(node: Node, schema: Node) -> str:
    inner = node.get("additionalProperties")
    if isinstance(inner, dict) and inner:
        return f"an object with {wanted(inner, schema)} for each key"
    return "an object"


def _example_of_type(node: Node, schema: Node) -> object:
    kind = node.get("type")
    if kind == "integer":
        return node["maximum"] if "maximum" in node else max(100, int(node.get("minimum", 0)))
    simple: dict[object, object] = {"number": 1.0, "string": UNKNOWN_TEXT, "boolean": True}
    if kind in simple:
        return node.get("const", simple[kind])
    if kind == "array":
        return [_example_of_type(_alternatives(node.get("items", {}), schema)[0], schema)]
    properties = node.get("properties", {})
    names = [name for name in properties if name in node.get("required", ())] or list(properties)[:1]
    return {name: example(properties[name], schema) for name in names}


def _fits(value: object, node: Node) -> bool:
    types: dict[object, tuple[type, ...]] = {
        "integer": (int, float),
        "number": (int, float),
        "string": (str,),
        "array": (list,),
        "object": (dict,),
        "boolean": (bool,),
    }
    return isinstance(value, types.get(node.get("type"), (object,)))


def _value_at(text: str, start: int) -> object:
    """Parses the JSON value that begins at `start`; if it is not JSON, returns the word there."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[0]
    except json.JSONDecodeError:
        return re.split(r"[\s;,)]", text[start:], maxsplit=1)[0].strip("'\"")
