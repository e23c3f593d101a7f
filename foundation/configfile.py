"""Config files in JSON, JSON with comments, YAML and TOML: reading them, `extends`, and `--set a.b=c`.

The result is a plain dict; `foundation.section.parse` gives it a type. Objects merge key by key; all other values,
including lists, are replaced as a whole. A key that appears twice in one object is refused, because parsers silently
keep the last one.

| suffix | read as |
|---|---|
| `.yaml`, `.yml` | YAML 1.2: `1e-4` is a number, `no` and `off` are texts (PyYAML alone reads YAML 1.1) |
| `.toml` | TOML |
| any other | JSON; comments and trailing commas are allowed, as is all of JSON5 |
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.paths import refuse_url
from foundation.shipped import find_shipped

ConfigTree = dict[str, Any]
"""A config or one of its sections: nested, untyped, as read from its file and `--set`."""

SUFFIXES = (".json", ".jsonc", ".json5", ".yaml", ".yml")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of a text in UTF-16, such as PowerShell writes."""
_YAML, _TOML = (".yaml", ".yml"), ".toml"


def load(path: str | Path, overrides: Sequence[str] = ()) -> ConfigTree:
    """Reads a config file with all files that it extends, then applies `--set` overrides in order.

    Args:
        path: a JSON, YAML or TOML file; if it does not exist, a file that headrace ships, e.g. `ds_configs/zero3.json`.
            `"extends": "base.json"` (or a list, where later files win) names files relative to it.
        overrides: texts of the form `a.b=value`; the value is JSON if it parses as JSON, else a string.

    Raises:
        ConfigError: a file is missing, has a syntax error, is not an object, extends itself, or repeats a key; or an
            override has no `=` or descends into something that is not an object.
    """
    refuse_url(path, field="--config")
    path = Path(path)
    raw = _read(path if path.exists() else find_shipped(path) or path, ())
    for override in overrides:
        _apply(raw, override)
    return raw


def overridden(raw: Mapping[str, Any], overrides: Sequence[str]) -> ConfigTree:
    """A copy of a config with `--set` overrides applied in order.

    Raises:
        ConfigError: an override has no `=`, or descends into something that is not an object.
    """
    changed = copy.deepcopy(dict(raw))
    for override in overrides:
        _apply(changed, override)
    return changed


def merge(base: ConfigTree, over: Mapping[str, Any]) -> ConfigTree:
    """Puts `over` on top of `base`: merges objects key by key, replaces other values."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def set_value(raw: ConfigTree, dotted: str, value: Any) -> None:
    """Sets one field, e.g. `run.steps` or `data.sources.0.path`, and creates missing objects on the way.

    Raises:
        ConfigError: the path leads into a value that is neither an object nor a list, or to a missing item of a list.
    """
    *parents, last = dotted.split(".")
    here: Any = raw
    for depth, key in enumerate(parents):
        here = here.setdefault(key, {}) if isinstance(here, dict) else _item(here, key, dotted)
        if not isinstance(here, dict | list):
            at = ".".join(parents[: depth + 1])
            raise ConfigError("--set", f"{dotted}={value}", why=f"{at} is not an object", remedy=f"set {at} itself")
    if isinstance(here, list):
        _item(here, last, dotted)
        here[int(last)] = value
    else:
        here[last] = value


def _read(path: Path, seen: tuple[Path, ...]) -> ConfigTree:
    if path.resolve() in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise ConfigError("extends", str(path), why=f"the files extend each other: {chain}", remedy="break the circle")
    own = _parse(path)
    own.pop("$schema", None)  # a key for editors
    bases = own.pop("extends", [])
    if not isinstance(bases, str) and not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        raise ConfigError("extends", bases, why="it names files", remedy='write "base.json" or ["a.json", "b.json"]')
    merged: ConfigTree = {}
    for base in [bases] if isinstance(bases, str) else bases:
        refuse_url(base, field="extends")
        merged = merge(merged, _read(path.parent / base, (*seen, path.resolve())))
    return merge(merged, own)


def _parse(path: Path) -> ConfigTree:
    try:
        data = path.read_bytes()
        if data.startswith(_UTF16):
            remedy = f"iconv -f UTF-16 -t UTF-8 {path} > utf8-{path.name}, and give that file"
            raise ConfigError("--config", str(path), why="it is text in UTF-16, not in UTF-8", remedy=remedy)
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.iterdir() if p.suffix in SUFFIXES) if path.parent.is_dir() else []
        remedy = (
            f"files there: {', '.join(near)}" if near else "check the path; it is relative to the directory you are in"
        )
        raise ConfigError("--config", str(path), why="no such file", remedy=remedy) from None
    except (OSError, UnicodeDecodeError) as error:
        why = "it is a directory" if path.is_dir() else str(error)
        raise ConfigError("--config", str(path), why=why, remedy="name a readable JSON, YAML or TOML file") from None
    parser = _parse_yaml if path.suffix in _YAML else _parse_toml if path.suffix == _TOML else _parse_json
    raw = parser(text, path)
    if not isinstance(raw, dict):
        kind = {list: "a list", str: "text", type(None): "nothing"}.get(type(raw), "a single value")
        raise ConfigError("--config", str(path), why=f"it holds {kind}, not an object", remedy="wrap it in {}")
    return raw


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_refuse_repeats)
    except json.JSONDecodeError as error:
        plain = error
    except (ValueError, RecursionError) as error:
        return _refuse_size("JSON", path, error)
    import json5  # noqa: PLC0415  ten times slower than json: only for what json refuses

    try:
        return json5.loads(text, object_pairs_hook=_refuse_repeats)
    except RecursionError as error:
        return _refuse_size("JSON", path, error)
    except ValueError as error:
        found = re.search(r":(\d+) (.*) at column (\d+)", str(error), re.DOTALL)
    if _is_yaml(text):
        remedy = f"mv {path} {path.with_suffix('.yaml')}, and give that file"
        raise ConfigError("--config", str(path), why="it is YAML under a name of JSON", remedy=remedy)
    if found and (int(found[1]), int(found[3])) > (plain.lineno, plain.colno):  # json stopped at valid JSON5
        return _refuse_syntax("JSON", path, f"{found[2][0].lower()}{found[2][1:]}", int(found[1]), int(found[3]))
    return _refuse_syntax("JSON", path, plain.msg, plain.lineno, plain.colno)


def _is_yaml(text: str) -> bool:
    """Whether a text that is no JSON is an object in YAML, in lines of its own as JSON would not have them."""
    import yaml  # noqa: PLC0415

    try:
        return not text.lstrip().startswith(("{", "[")) and isinstance(yaml.safe_load(text), dict)
    except (yaml.YAMLError, ValueError, RecursionError):
        return False


def _parse_yaml(text: str, path: Path) -> Any:
    import yaml  # noqa: PLC0415

    from foundation.yaml_loader import Yaml12Loader  # noqa: PLC0415

    try:
        return yaml.load(text, Yaml12Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        return _refuse_syntax("YAML", path, str(error.problem or error.context), line, column)
    except (ValueError, RecursionError) as error:
        return _refuse_size("YAML", path, error)
    except yaml.YAMLError as error:  # characters that YAML does not allow
        return _refuse_syntax("YAML", path, str(error).splitlines()[0], 1, 1)


def _parse_toml(text: str, path: Path) -> Any:
    import tomllib  # noqa: PLC0415

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        why = f"not TOML: {error}"
        raise ConfigError("--config", str(path), why=why, remedy=f"look at {path}") from None


def _refuse_syntax(language: str, path: Path, problem: str, line: int, column: int) -> None:
    why = f"not {language}: {problem} at line {line}, column {column}"
    raise ConfigError("--config", str(path), why=why, remedy=f"look at {path}:{line}") from None


def _refuse_size(language: str, path: Path, error: Exception) -> None:
    """Refuses objects nested deeper than Python's stack, and numbers with more digits than Python reads."""
    problem = "nested too deeply" if isinstance(error, RecursionError) else str(error).split(";")[0].split(":")[0]
    why = f"not readable as {language}: {problem}"
    raise ConfigError("--config", str(path), why=why, remedy="write a smaller file, and smaller numbers") from None


def _refuse_repeats(pairs: Iterable[tuple[str, Any]]) -> ConfigTree:
    whole: ConfigTree = {}
    for key, value in pairs:
        if key in whole:
            raise ConfigError(key, value, why="the key appears twice in one object", remedy="keep one of the two")
        whole[key] = value
    return whole


def _apply(raw: ConfigTree, override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError("--set", override, why="it has no '='", remedy="write --set run.steps=100")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    set_value(raw, dotted, value)


def _item(items: list[Any], key: str, dotted: str) -> Any:
    if not key.isdigit() or int(key) >= len(items):
        remedy = f"count from 0 to {len(items) - 1}" if items else "the list is empty"
        raise ConfigError("--set", dotted, why=f"'{key}' is no index of a list of {len(items)}", remedy=remedy)
    return items[int(key)]
