"""Changes of single keys of a config that is loaded already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.schema import Config


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """A config with other values.

    Args:
        config: the config; it is not changed.
        changes: dotted keys with their values, which are of the right types: they are not validated.
    """
    for key, value in changes.items():
        config = _with(config, key.split("."), value)
    return config


def as_sets(changes: Mapping[str, Any]) -> str:
    """Changes as words of a command line: `--set parallel.tp=2 --set compile.enabled=true`."""
    return " ".join(f"--set {key}={_text(value)}" for key, value in changes.items())


def _with(section: Any, keys: list[str], value: Any) -> Any:
    first, *rest = keys
    return section.model_copy(update={first: _with(getattr(section, first), rest, value) if rest else value})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
