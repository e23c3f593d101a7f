"""`Section`: the base of every config section, frozen and closed to unknown keys.

`parse` turns a plain dict into a section and pydantic's complaints into one `ConfigError` that names the field, the
value and the nearest key that exists.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from headrace.base.errors import ConfigError


class Section(BaseModel):
    """A frozen group of config fields. Unknown keys are refused; numbers are never made from strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def _whole(value: Any) -> Any:
    """5e8 in JSON is a float; where a count is wanted it is a whole number all the same."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, BeforeValidator(_whole), Field(gt=0)]
"""A whole number of things, at least one. `5e8` may be written for 500000000."""

Index = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
"""A whole number from zero up."""

S = TypeVar("S", bound=Section)


def parse(section: type[S], raw: Mapping[str, Any], *, at: str = "") -> S:
    """Validates `raw` as `section`.

    Args:
        section: the class to build.
        raw: parsed JSON.
        at: dotted path of `raw` within the whole config, for error messages.

    Raises:
        ConfigError: on the first unknown key (reported before anything else, since a typo usually explains the
            rest), or else on the first value of a wrong type or out of range.
    """
    try:
        return section.model_validate(dict(raw))
    except ValidationError as error:
        details = error.errors()
        first = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
        raise _as_config_error(section, first, at) from None


def suggest(word: str, known: list[str]) -> str | None:
    """The entry of `known` nearest to `word`, or None when nothing is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return near[0] if near else None


def _as_config_error(section: type[BaseModel], detail: Any, at: str) -> ConfigError:
    loc = [str(part) for part in detail["loc"]]
    field = ".".join(([at] if at else []) + _without_union_tags(section, loc))
    if detail["type"] == "extra_forbidden":
        known = _keys_beside(section, loc)
        near = suggest(loc[-1], known)
        remedy = f"did you mean '{near}'?" if near else f"the keys here are: {', '.join(sorted(known))}"
        return ConfigError(field, detail["input"], why="there is no such key", remedy=remedy)
    if detail["type"] == "missing":
        return ConfigError(field, why="this key is required", remedy=f"add it; {_describe(section, loc)}")
    message = str(detail["msg"]).removeprefix("Value error, ")
    return ConfigError(field, detail["input"], why=message[0].lower() + message[1:], remedy=_describe(section, loc))


def _walk(section: type[BaseModel], loc: list[str]) -> type[BaseModel]:
    """The section that the parent of `loc` names, following nested sections, lists and optional values."""
    here = section
    for part in loc[:-1]:
        info = here.model_fields.get(part)
        if info is not None:
            here = next((c for c in _classes(info.annotation) if issubclass(c, BaseModel)), here)
        else:
            here = next((c for c in _subsections(here) if c.__name__ == part), here)
    return here


def _subsections(section: type[BaseModel]) -> list[type[BaseModel]]:
    found = (c for info in section.model_fields.values() for c in _classes(info.annotation))
    return [c for c in found if issubclass(c, BaseModel)]


def _classes(annotation: Any) -> list[type]:
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation]
    return [c for arg in get_args(annotation) for c in _classes(arg)]


def _keys_beside(section: type[BaseModel], loc: list[str]) -> list[str]:
    fields = _walk(section, loc).model_fields
    return [info.alias or name for name, info in fields.items()]


def _describe(section: type[BaseModel], loc: list[str]) -> str:
    info = _walk(section, loc).model_fields.get(loc[-1]) if loc else None
    return info.description if info is not None and info.description else "see docs/config.md for what it takes"


def _without_union_tags(section: type[BaseModel], loc: list[str]) -> list[str]:
    """Drops the class names that pydantic adds to a location where a field may hold one of several sections."""
    names = {c.__name__ for c in _all_sections(section)} | {"str", "int", "float", "bool"}
    return [part for part in loc if part not in names and not part.startswith(("function-", "list[", "tuple["))]


def _all_sections(section: type[BaseModel]) -> set[type[BaseModel]]:
    found = {section}
    for sub in _subsections(section):
        if sub not in found:
            found |= _all_sections(sub)
    return found
