"""One JSON file is a run: reading it, `extends`, and `--set a.b=c`.

The result is a plain dict; `headrace.base.section.parse` gives it a type. Dicts merge key by key, everything else
(lists too) is replaced whole. A key that appears twice in one object is refused: JSON keeps the last silently.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError


def load(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Reads a config file with all it extends, then applies `--set` overrides in order.

    Args:
        path: a JSON file. `"extends": "base.json"` (or a list, later wins) names files relative to it.
        overrides: texts of the form `a.b=value`; the value is JSON where it parses as JSON, else a string.

    Raises:
        ConfigError: a file that is missing, not JSON, not an object, extends itself, or repeats a key; an override
            without `=` or one that descends into something that is not an object.
    """
    raw = _read(Path(path), ())
    for override in overrides:
        _apply(raw, override)
    return raw


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`: objects are merged key by key, other values replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise ConfigError("extends", str(path), why=f"the files extend each other: {chain}", remedy="break the circle")
    own = _parse(path)
    bases = own.pop("extends", [])
    if not isinstance(bases, str) and not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        raise ConfigError("extends", bases, why="it names files", remedy='write "base.json" or ["a.json", "b.json"]')
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        merged = merge(merged, _read(path.parent / base, (*seen, path.resolve())))
    return merge(merged, own)


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.json")) if path.parent.is_dir() else []
        remedy = (
            f"files there: {', '.join(near)}" if near else "check the path; it is relative to the directory you are in"
        )
        raise ConfigError("--config", str(path), why="no such file", remedy=remedy) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--config", str(path), why=str(error), remedy="name a readable JSON file") from None
    try:
        raw = json.loads(text, object_pairs_hook=_refuse_repeats)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        remedy = f"look at {path}:{error.lineno} (JSON has no comments and no trailing commas)"
        raise ConfigError("--config", str(path), why=f"not JSON: {error.msg} at {where}", remedy=remedy) from None
    if not isinstance(raw, dict):
        raise ConfigError(
            "--config", str(path), why=f"holds a {type(raw).__name__}, not an object", remedy="wrap it in {}"
        )
    return raw


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for key, value in pairs:
        if key in whole:
            raise ConfigError(key, value, why="the key appears twice in one object", remedy="keep one of the two")
        whole[key] = value
    return whole


def _apply(raw: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError("--set", override, why="it has no '='", remedy="write --set run.steps=100")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    *parents, last = dotted.split(".")
    here: Any = raw
    for depth, key in enumerate(parents):
        here = here.setdefault(key, {}) if isinstance(here, dict) else _item(here, key, dotted)
        if not isinstance(here, dict | list):
            at = ".".join(parents[: depth + 1])
            raise ConfigError("--set", override, why=f"{at} is not an object", remedy=f"set {at} itself")
    if isinstance(here, list):
        _item(here, last, dotted)
        here[int(last)] = value
    else:
        here[last] = value


def _item(items: list[Any], key: str, dotted: str) -> Any:
    if not key.isdigit() or int(key) >= len(items):
        remedy = f"count from 0 to {len(items) - 1}" if items else "the list is empty"
        raise ConfigError("--set", dotted, why=f"'{key}' is no index of a list of {len(items)}", remedy=remedy)
    return items[int(key)]
