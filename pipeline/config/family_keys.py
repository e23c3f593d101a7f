"""Keys that transformers reads for a model family, taken from its source text: importing its classes costs seconds.

A published config.json has more keys than the family's class today: names from before transformers 5, which the class
converts (`rope_theta`, `torch_dtype`), and names that nothing reads (`_name_or_path`, `pretraining_tp` of a Mistral).
The former are kept, the latter are left out and reported. Source: transformers 5.23, `models/*/configuration_*.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.section import suggest

_SAME = {"gpt-sw3": "gpt2"}
"""`model_type` of a family that has the classes of another."""
_BASES = ("PreTrainedConfig", "RotaryEmbeddingConfigMixin")
"""Bases of all config classes: the names from before transformers 5 that they read are the next two tables."""
_LEGACY = frozenset({"torch_dtype", "num_labels"})
_LEGACY_ROPE = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
_READ = re.compile(r'kwargs\.(?:pop|get)\(\s*"(\w+)"|"(\w+)" in kwargs')
_OPTIONAL = re.compile(r'getattr\(config, "(\w+)"')
UNUSED = frozenset(
    {
        *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled"),
        *("_name_or_path", "attn_implementation", "auto_map", "experts_implementation", "name_or_path"),
        *("output_attentions", "pretraining_tp", "quantization_config", "rope_interleaved", "unsloth_fixed"),
        *("unsloth_version", "use_cache"),
    }
)
"""Keys of published files that are left out in every family whose class does not have them: they say where the file
came from, how a program computes attention or generates, or how stored weights are quantized."""
_MARKS = frozenset({"architectures", "transformers_version"})
"""Keys of a config.json that transformers has written."""
_TYPO = 0.85


@dataclass(frozen=True)
class FamilyKeys:
    """The keys of one `model_type`.

    Attributes:
        keys: fields of its config class, with both names of an alias.
        legacy: keys under names from before transformers 5 that the class converts.
        aliases: another name of a key -> the field.
        modeling: path of the file with its layers.
    """

    keys: frozenset[str]
    legacy: frozenset[str]
    aliases: Mapping[str, str]
    modeling: Path

    @cached_property
    def optional(self) -> frozenset[str]:
        """Keys that the class does not have, but layers read where they are given, e.g. `head_dim` in Qwen3-MoE."""
        found = self.modeling.is_file()
        return frozenset(_OPTIONAL.findall(self.modeling.read_text(encoding="utf-8")) if found else ())


@dataclass
class _Class:
    """What the source of a config class and its bases defines."""

    fields: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)


@cache
def families() -> Mapping[str, str]:
    """Returns `model_type` -> name of its config class, of all that transformers has; empty without transformers."""
    return {**_table("CONFIG_MAPPING_NAMES"), **dict.fromkeys(_SAME, "")} if _root() else {}


@cache
def family(kind: str) -> FamilyKeys | None:
    """Returns the keys of a `model_type`; None if the source of its class is not found."""
    root, kind = _root(), _SAME.get(kind, kind)
    name = families().get(kind)
    if root is None or name is None:
        return None
    folder = root / "models" / _table("SPECIAL_MODEL_TYPE_TO_MODULE_NAME").get(kind, kind.replace("-", "_"))
    text = f"class {name}("
    file = next((each for each in folder.glob("configuration_*.py") if text in each.read_text(encoding="utf-8")), None)
    if file is None:
        return None
    found = _class(file, name)
    legacy = _LEGACY | (_LEGACY_ROPE if "rope_parameters" in found.fields else frozenset())
    keys = {*found.fields, *found.aliases, *found.aliases.values(), "model_type", "per_layer_config"}
    modeling = file.with_name(file.name.replace("configuration_", "modeling_"))
    return FamilyKeys(frozenset(keys), (legacy | found.read) - keys - UNUSED, found.aliases, modeling)


def as_read(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns a `model.config` without the keys that change nothing in its family, and these keys.

    Any unknown key of a file that transformers wrote is one of them, unless it looks like a typo of a key that the file
    does not have. A Mistral with `layer_types` becomes a Ministral, as transformers reads it.
    """
    left_out = _unread(config)
    kept = {key: value for key, value in config.items() if key not in left_out}
    if kept.get("model_type") == "mistral" and "layer_types" in kept:
        kept["model_type"] = "ministral"
    return kept, left_out


def _unread(config: Mapping[str, Any]) -> list[str]:
    known = family(str(config.get("model_type")))
    if known is None:
        return []
    strange = _unknown(known, config)
    if not config.keys() & _MARKS:
        return [key for key in strange if key in UNUSED]
    absent = [*(known.keys - config.keys())]
    return [key for key in strange if key in UNUSED or not get_close_matches(key, absent, n=1, cutoff=_TYPO)]


def key_problems(config: Mapping[str, Any], *, legacy: bool = True) -> Iterator[ConfigError]:
    """Yields the refusals of a `model.config`: its family, keys that it does not have, two values of one key.

    transformers accepts them silently and builds another model.

    Args:
        config: the config, with `model_type`.
        legacy: whether the names from before transformers 5 are accepted.
    """
    kind = str(config.get("model_type"))
    known = family(kind)
    if known is None:
        if families() and kind not in families():
            near = suggest(kind, list(families()))
            remedy = f"did you mean '{near}'?" if near else "use one that transformers knows, e.g. llama"
            yield ConfigError(
                "model.config.model_type", kind, why="transformers has no such architecture", remedy=remedy
            )
        return
    for key in _unknown(known, config, legacy=legacy):
        yield _refusal(known, kind, key, config[key])
    for key, stored in known.aliases.items():
        if key in config and stored in config and config[key] != config[stored]:
            why = f"{stored}, the same key of {kind} under another name, is {config[stored]!r}"
            yield ConfigError(f"model.config.{key}", config[key], why=why, remedy="remove one of the two")
    now = config.get("rope_parameters")
    if isinstance(now, dict) and "rope_theta" in known.legacy:
        yield from _two_ropes(config, now)


def _two_ropes(config: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yields the values under old names of RoPE that `rope_parameters` contradicts."""
    for key, value in {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}.items():
        if value is not None and key != "type" and now.get(key, value) != value:
            why = f"model.config.rope_parameters, which transformers reads first, has {key} {now[key]!r}"
            name = key if key in config else f"rope_scaling.{key}"
            yield ConfigError(f"model.config.{name}", value, why=why, remedy="remove one of the two")


def _refusal(known: FamilyKeys, kind: str, key: str, value: object) -> ConfigError:
    near = suggest(key, sorted(known.keys | known.optional))
    remedy = f"did you mean '{near}'?" if near else f"remove it, or see the {kind} config of transformers"
    if key in known.legacy & _LEGACY_ROPE:  # a stage changes a config whose names are those of today
        inner = {"rope_parameters": value if key == "rope_scaling" else {key: value}}
        remedy = f"use {ast.unparse(ast.parse(repr(inner)))}".replace("'", '"')
    return ConfigError(f"model.config.{key}", value, why=f"{kind} has no such key", remedy=remedy)


def _unknown(known: FamilyKeys, config: Mapping[str, Any], *, legacy: bool = True) -> list[str]:
    others = known.legacy if legacy else frozenset[str]()
    strange = [key for key in config if key not in known.keys and key not in others]
    return [key for key in strange if key not in known.optional] if strange else []


@cache
def _root() -> Path | None:
    found = find_spec("transformers")
    places = (found and found.submodule_search_locations) or ()
    return next((Path(place) for place in places), None)


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def _table(name: str) -> Mapping[str, str]:
    """Returns a table of the auto classes: an assignment of `OrderedDict([(model_type, text), ...])`."""
    root = _root()
    assert root is not None
    for node in _tree(root / "models/auto/auto_mappings.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Call):
            return dict(ast.literal_eval(node.value.args[0]))
    return {}


def _class(file: Path, name: str) -> _Class:
    """Reads a config class with its bases, in this file or the one it is imported from."""
    tree = _tree(file)
    node = next((each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name), None)
    if node is None:
        return _imported(file, tree, name)
    found = _Class()
    for base in node.bases:
        if isinstance(base, ast.Name):
            above = _class(file, base.id)
            found.fields |= above.fields
            found.read |= above.read
            found.aliases |= above.aliases
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and not ast.unparse(line.annotation).startswith("ClassVar"):
            found.fields.add(ast.unparse(line.target))
        elif isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "attribute_map":
            found.aliases = ast.literal_eval(line.value)
    if name not in _BASES:
        found.read |= {word for pair in _READ.findall(ast.unparse(node).replace("'", '"')) for word in pair if word}
    return found


def _imported(file: Path, tree: ast.Module, name: str) -> _Class:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level and any(each.name == name for each in node.names):
            place = file.parents[node.level - 1].joinpath(*(node.module or "").split(".")).with_suffix(".py")
            if place.is_file():
                return _class(place, name)
    return _Class()
