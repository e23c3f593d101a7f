"""Changes of single keys of a config that is loaded already."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.config.sections.run import Config


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """A config with other values.

    Args:
        config: the config; it is not changed.
        changes: dotted keys with their values, which are of the right types: they are not validated.
    """
    tree = _Tree()
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, _Tree())
        node[last] = value
    changed_config: Config = _copy(config, tree)
    return changed_config


def as_sets(changes: Mapping[str, Any]) -> str:
    """Changes as words of a command line: `--set parallel.tp=2 --set compile.enabled=true`."""
    return " ".join(f"--set {each}" for each in as_overrides(changes))


class _Tree(dict[str, Any]):
    """Changes of a section, in which those of a section below are a tree again."""


def _copy(section: Any, tree: _Tree) -> Any:
    """One copy of each section that changes: a copy costs more than a change."""
    update = {
        key: _copy(getattr(section, key), value) if isinstance(value, _Tree) else value for key, value in tree.items()
    }
    return section.model_copy(update=update)


def as_overrides(changes: Mapping[str, Any]) -> list[str]:
    """Changes as texts `key=value`, as `--set` takes them."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()]
