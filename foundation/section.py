"""`Section`: the base of every config section, frozen and closed to unknown keys.

`parse` turns a plain dict into a section. pydantic's findings become one `ConfigError` in our own words: the field, the
value, the wanted values, and the nearest existing key or value.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from foundation.errors import ConfigError, RefusedValueError, problems_in, refuse_all
from foundation.json_schema import UNKNOWN_TEXT, Node, as_json, example, given, keys_at, node_at, schema_of, wanted


class Section(BaseModel):
    """A frozen group of config fields. Unknown keys are refused; numbers are never made from strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, raw: Any) -> Any:
        """Turns JSON floats such as 5e8 into whole numbers, for fields that want whole numbers."""
        if not isinstance(raw, Mapping):
            return raw
        return {key: int(value) if cls._is_whole(key, value) else value for key, value in raw.items()}

    @classmethod
    def _is_whole(cls, key: str, value: object) -> bool:
        if not isinstance(value, float) or not value.is_integer() or key not in cls.model_fields:
            return False
        types = _classes(cls.model_fields[key].annotation)
        return int in types and float not in types


def _at_most_64_bits(number: int) -> int:
    if number >= 1 << 63:
        raise ValueError("it does not fit into 64 bits")
    return number


Count = Annotated[int, Field(gt=0), AfterValidator(_at_most_64_bits)]
"""A number of things, at least one."""

Index = Annotated[int, Field(ge=0), AfterValidator(_at_most_64_bits)]
"""A whole number from zero up."""

S = TypeVar("S", bound=Section)


def parse(section: type[S], raw: Mapping[str, Any], *, at: str = "") -> S:
    """Validates `raw` as `section`.

    Args:
        section: the class to build.
        raw: a parsed config file, or a part of one.
        at: dotted path of `raw` within the whole config, for error messages.

    Raises:
        ConfigError: unknown keys, values of a wrong type or out of range, and missing keys, all in one message.
            Unknown keys come first, since a typo may explain the rest.
    """
    try:
        return section.model_validate(dict(raw))
    except ValidationError as error:
        found = _problems(error, schema_of(section), at)
    refuse_all(found)
    raise AssertionError("pydantic refused the config and named nothing")


def problems_of(section: type[Section], raw: Mapping[str, Any]) -> list[ConfigError]:
    """Returns the problems that `parse` would find, one error each; empty if there are none."""
    try:
        parse(section, raw)
    except ConfigError as error:
        return list(problems_in(error))
    return []


def suggest(word: str, known: list[str]) -> str | None:
    """The entry of `known` nearest to `word`; None if none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return near[0] if near else None


_DTYPES = frozenset({"fp16", "bf16", "fp32", "fp64", "fp8", "int8", "float16", "bfloat16", "float32"})
"""Names of dtypes: they are one letter apart, but not typos of each other."""


class _Complaint:
    """A problem of one value that pydantic found."""

    def __init__(self, detail: Any, schema: Node) -> None:
        self.kind, self.value = str(detail["type"]), detail["input"]
        self.context: dict[str, Any] = detail.get("ctx", {})
        self.loc: list[str] = []
        for part in detail["loc"]:  # for a value with several possible types, pydantic adds their names
            unknown = self.kind == "extra_forbidden" and part == detail["loc"][-1]
            if unknown or node_at(schema, [*self.loc, str(part)]) is not None:
                self.loc.append(str(part))
        if self.kind == "missing" and self.loc and self.loc[-1].isdigit():  # a list that is too short
            self.kind = "too_short"
            self.loc.pop()


def _problems(error: ValidationError, schema: Node, at: str) -> list[ConfigError]:
    found = [_Complaint(detail, schema) for detail in error.errors()]
    unknown = [each for each in found if each.kind == "extra_forbidden"]
    told = {(*each.loc[:-1], suggest(each.loc[-1], keys_at(schema, each.loc[:-1]))) for each in unknown}
    others: list[_Complaint] = []
    for first in (each for each in found if each.kind != "extra_forbidden" and tuple(each.loc) not in told):
        # for a value with several possible types, the deepest complaint is the most precise
        deepest = max(
            (each for each in found if each.loc[: len(first.loc)] == first.loc), key=lambda each: len(each.loc)
        )
        if deepest.kind != "extra_forbidden" and all(each.loc != deepest.loc for each in others):
            others.append(deepest)
    listed: set[tuple[str, ...]] = set()
    return [_as_error(each, schema, at, listed) for each in [*unknown, *others]]


def _as_error(first: _Complaint, schema: Node, at: str, listed: set[tuple[str, ...]]) -> ConfigError:
    """Makes the error of one complaint; a section's keys are listed once, in the first error that needs them."""
    field = ".".join([*([at] if at else []), *first.loc]) or "the config"
    if first.kind == "extra_forbidden":
        known, section = keys_at(schema, first.loc[:-1]), tuple(first.loc[:-1])
        near = suggest(first.loc[-1], known)
        remedy = f"did you mean '{near}'?" if near else "remove it"
        if not near and section not in listed:
            listed.add(section)
            remedy += f"; the keys here are: {', '.join(sorted(known))}"
        return ConfigError(field, first.value, why="there is no such key", remedy=remedy)
    if first.kind == "missing":
        return ConfigError(field, why="this key is required", remedy=f"add it: {_remedy(first, schema)}")
    if first.kind == "value_error":  # one of our validators, with its own words
        error = first.context["error"]
        remedy = error.remedy if isinstance(error, RefusedValueError) else _remedy(first, schema)
        return ConfigError(field, first.value, why=str(error), remedy=remedy)
    return ConfigError(field, first.value, why=_why(first, schema), remedy=_remedy(first, schema))


def _why(found: _Complaint, schema: Node) -> str:
    if isinstance(found.value, float) and not math.isfinite(found.value):
        return "it is not a finite number"
    expected = wanted(node_at(schema, found.loc) or schema, schema)
    right_type = found.kind.startswith(("greater_", "less_", "literal_", "too_", "string_too_"))
    return f"it has to be {expected}" + ("" if right_type else f"; this is {given(found.value)}")


def _remedy(found: _Complaint, schema: Node) -> str:
    """The nearest choice, or an example and the description of the key, or of the list that contains it."""
    node = node_at(schema, found.loc) or schema
    choices = [
        word for each in [node, *node.get("anyOf", ())] for word in each.get("enum", ()) if isinstance(word, str)
    ]
    near = suggest(found.value, choices) if isinstance(found.value, str) else None
    if near and found.value not in _DTYPES:
        return f"did you mean '{near}'?"
    above = ([*found.loc[:end]] for end in range(len(found.loc), 0, -1))
    described = next((each for each in (node_at(schema, loc) for loc in above) if each and "description" in each), node)
    text, shown = str(described.get("description", "")), as_json(example(described, schema))
    if UNKNOWN_TEXT in shown or shown in text:
        return text or "see docs/config-reference.md for the keys"
    return f"{shown} ({text})" if text else shown


def _classes(annotation: Any) -> list[type]:
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation]
    return [c for arg in get_args(annotation) for c in _classes(arg)]
