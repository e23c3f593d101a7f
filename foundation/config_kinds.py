"""The kinds of config files, and their keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from foundation.json_schema import Key, for_editors, keys_of, schema_of


@dataclass(frozen=True)
class Kind:
    """A kind of config files.

    Attributes:
        name: name of the kind, as the user types it.
        what: the kind in words, for titles.
        used_by: commands that read such files.
        config: class of the whole file, as `module:Class`.
    """

    name: str
    what: str
    used_by: str
    config: str

    def section(self) -> Any:
        """Imports the class of the whole file."""
        module, _, name = self.config.partition(":")
        return getattr(import_module(module), name)

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of a file, for editors."""
        # as in configs for the Trainer of transformers
        return for_editors(self.section(), title=f"headrace: {self.what}", auto=self.name == "run")


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "run",
            "the config of a training run",
            "headrace train, distill, cache-logits, check, prove; deepspeed pipeline/train.py",
            "pipeline.config.sections.run:Config",
        ),
        Kind(
            "corpus",
            "the config of a data-prep job",
            "headrace prep; python -m data_prep",
            "data_prep.config.corpus:CorpusConfig",
        ),
        Kind(
            "prune",
            "the config of a pruning",
            "headrace prune; python pipeline/prune.py; torchrun pipeline/prune.py",
            "pipeline.compress.pruning.config:PruneConfig",
        ),
        Kind(
            "quantize",
            "the config of a quantization",
            "headrace quantize; python pipeline/quantize.py",
            "pipeline.compress.quantization.config:QuantizeConfig",
        ),
        Kind(
            "compress",
            "the config of a whole compression",
            "headrace compress run",
            "pipeline.compress.recipe.config:RecipeConfig",
        ),
        Kind(
            "card",
            "the facts for the papers of a model or a dataset",
            "headrace card, export (--facts FILE)",
            "pipeline.models.card.facts:CardFacts",
        ),
        Kind(
            "site",
            "the settings of a Slurm site, in TOML",
            "headrace submit (slurm/site.toml)",
            "headrace.submission.site:SiteConfig",
        ),
    )
}


@cache
def keys(kind: str) -> tuple[Key, ...]:
    """All keys of a kind of config files, sections before their own keys."""
    return tuple(keys_of(schema_of(KINDS[kind].section())))


def parts_of(path: str) -> tuple[str, ...]:
    """The names in a path, without indices: `data.sources[].weight` and `data.sources.0.weight` are the same key."""
    words = re.split(r"[.\[\]]+", path.strip())
    return tuple(word for word in words if word and not word.isdigit())


def example_file(key: Key, kind: str) -> str:
    """A config with an example of one key, on one line, and of the keys that its section requires beside it."""
    value: Any = key.example
    names = re.findall(r"\[[^\]]*\]|[^.\[\]]+", key.path)
    place = key.path
    for number, name in reversed(list(enumerate(names))):
        place = place.removesuffix(name).removesuffix(".")
        if not name.startswith("["):
            value = {**(_required(kind, place) if number else {}), name: value}
        elif name != "[]":
            value = [{"step": name[1:-1]} | {name: each for name, each in value.items() if name != "step"}]
        else:
            value = [value]
    return json.dumps(value, ensure_ascii=False)


def _required(kind: str, section: str) -> dict[str, Any]:
    beside = {key.path.removeprefix(f"{section}."): key for key in keys(kind) if key.path.startswith(f"{section}.")}
    return {name: key.example for name, key in beside.items() if key.required and name.isidentifier()}


def complete_override(kind: str) -> Callable[[str], list[str]]:
    """Returns a function that completes the argument of `--set` with keys, each followed by `=`."""

    def complete(incomplete: str) -> list[str]:
        paths = (re.sub(r"\[\w*\]", ".0", key.path) for key in keys(kind) if not key.is_section)
        return [f"{path}=" for path in dict.fromkeys(paths) if path.startswith(incomplete)]

    return complete
