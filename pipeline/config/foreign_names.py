"""Names that other tools have for keys of a run's config, in `foreign_names.json`: one table for `check` and `explain`.

| entry | meaning |
|---|---|
| `same` | our key -> other tools' names of it; values have the same meaning |
| `instead` | names with other values: keys to `use`, or a `note` on what to do, or why there is `no` such key |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError

_TABLE = Path(__file__).with_name("foreign_names.json")
UNKNOWN = "there is no such key"
"""Reason of the refusal of an unknown key."""


@dataclass(frozen=True)
class ForeignName:
    """Other tools' name for something.

    Attributes:
        same: The key here that takes the same values; empty if there is none.
        use: Keys and values to write in its place.
        note: What to do, or a remark on `use`.
        no: Why there is nothing like it, and after a semicolon what to use in its place.
    """

    same: str = ""
    use: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    no: str = ""

    @property
    def ours(self) -> list[str]:
        """The keys here that take its place."""
        return [self.same] if self.same else list(self.use)

    @property
    def why(self) -> str:
        """The reason of a refusal."""
        return f"{UNKNOWN}; other tools have it" if not self.no else f"not offered: {self.no.partition('; ')[0]}"

    def remedy(self, value: object = None) -> str:
        """Returns what to do; `value` is what the user gave, None if it is not known."""
        if self.same:
            return f"use {self.same}" + ("" if value is None else f" = {json.dumps(value, default=str)}")
        if self.no:
            return self.no.partition("; ")[2] or "remove it"
        keys = " and ".join(f"{key} = {json.dumps(each)}" for key, each in self.use.items())
        return "; ".join(text for text in (f"use {keys}" if keys else "", self.note) if text)


@cache
def foreign_names() -> Mapping[str, ForeignName]:
    """Returns the table: name -> what it is here."""
    raw = json.loads(_TABLE.read_text(encoding="utf-8"))
    found = {name: ForeignName(same=ours) for ours, names in raw["same"].items() for name in names}
    for entry in raw["instead"]:
        words = (pair.partition("=") for pair in entry.get("use", "").split())
        use = {key: _value(text) for key, _, text in words}
        found |= dict.fromkeys(entry["names"], ForeignName(use=use, note=entry.get("note", ""), no=entry.get("no", "")))
    return found


def same_key(name: object) -> str | None:
    """Returns the key that takes the values of another tool's; None if there is none."""
    found = find_name(name)
    return found.same or None if found else None


def find_name(path: object) -> ForeignName | None:
    """Looks up the last name of a dotted path; `-` counts as `_`. None if no other tool's key is known by it."""
    return foreign_names().get(str(path).rpartition(".")[2].replace("-", "_"))


def with_foreign_name(error: ConfigError) -> ConfigError:
    """Returns the refusal of an unknown key with the remedy of the table, if its name is in there; else the same."""
    found = find_name(error.field) if error.why == UNKNOWN else None
    if found is None or error.field in found.ours:
        return error
    return ConfigError(error.field, error.value, why=found.why, remedy=found.remedy(error.value))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
