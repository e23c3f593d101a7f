"""Loads a run's config: a JSON file and `--set` overrides, validated as a `Config`; changes single keys of configs.

Loading takes milliseconds and no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation import configfile
from foundation.errors import ConfigError, problems_in, refuse_all
from foundation.section import parse
from pipeline.config.deepspeed.auto import with_optimizer
from pipeline.config.deepspeed.defaults import differences
from pipeline.config.deepspeed.file import translate
from pipeline.config.family_keys import as_read
from pipeline.config.foreign_files import refuse_foreign
from pipeline.config.foreign_names import with_foreign_name
from pipeline.config.sections.run import Config

_CORPUS_KEYS = frozenset({"sources", "output", "tokenizer"})


@dataclass(frozen=True)
class LoadedConfig:
    """A config, with notes on how its file was read.

    Attributes:
        config: the validated config.
        ignored: "key = value" of DeepSpeed's keys that change nothing here.
        auto: "key = value" of keys that were "auto".
        differs: absent keys whose meaning differs from DeepSpeed's and changes the loss curve.
    """

    config: Config
    ignored: tuple[str, ...]
    auto: tuple[str, ...]
    differs: tuple[str, ...] = ()

    @property
    def notes(self) -> list[tuple[str, tuple[str, ...]]]:
        """Notes for the user by kind: values for "auto", keys that were ignored. Kinds without notes are left out."""
        return [(label, texts) for label, texts in (("auto", self.auto), ("ignored", self.ignored)) if texts]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads, merges and validates a run's config; see `read_config`."""
    return read_config(path, overrides).config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Reads, merges and validates a run's config.

    Args:
        path: a JSON file with DeepSpeed's keys and Headrace's sections side by side.
        overrides: `--set` texts, applied last.

    Raises:
        ConfigError: the file cannot be read, or has keys or values that cannot run, or keys under old names;
            `CombinedConfigError` names all of them.
    """
    raw = configfile.load(path, overrides)
    if raw.keys() >= _CORPUS_KEYS:
        why = "it has sources, output and tokenizer: it is a corpus config of data prep"
        raise ConfigError("--config", str(path), why=why, remedy=f"headrace prep --config {path}")
    refuse_foreign(raw, str(path))
    raw, unused = _without_unread(raw)
    translated = translate(with_optimizer(raw))
    try:
        config = parse(Config, translated.raw)
    except ConfigError as error:
        refuse_all([*translated.refused, *map(with_foreign_name, problems_in(error))])
        raise
    refuse_all(translated.refused)
    return LoadedConfig(
        config, (*unused, *translated.ignored), translated.auto, tuple(differences(config, raw, translated.raw))
    )


def _without_unread(raw: configfile.ConfigTree) -> tuple[configfile.ConfigTree, list[str]]:
    """Leaves out the keys of a published config.json that its family does not read; returns their names, too."""
    model = raw.get("model")
    given = model.get("config") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(given, dict):
        return raw, []
    kept, left_out = as_read(given)
    return {**raw, "model": {**model, "config": kept}}, [f"model.config.{key}" for key in left_out]


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns a config with other values.

    Args:
        config: the config; it is not changed.
        changes: dotted keys with their values; types are not validated.
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
    """Formats changes as arguments of a command line: `--set parallel.tp=2 --set compile.enabled=true`."""
    return " ".join(f"--set {each}" for each in as_overrides(changes))


class _Tree(dict[str, Any]):
    """Changes of a section; the changes of each section inside it are a nested tree."""


def _copy(section: Any, tree: _Tree) -> Any:
    """Copies each changed section only once, since a copy costs more than a change."""
    update = {
        key: _copy(getattr(section, key), value) if isinstance(value, _Tree) else value for key, value in tree.items()
    }
    return section.model_copy(update=update)


def as_overrides(changes: Mapping[str, Any]) -> list[str]:
    """Formats changes as texts `key=value` for `--set`."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()]
