"""Translates a DeepSpeed file, as DeepSpeed and the Hugging Face Trainer mean it, to the schema.

Keys get the name they have here, "auto" gets a value, and keys that change nothing are set aside and listed. All other
unsupported keys are collected and refused together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foundation.configfile import ConfigTree
from foundation.errors import ConfigError
from pipeline.config.deepspeed.auto import SAMPLES_PER_DEVICE, resolve_auto
from pipeline.config.deepspeed.curriculum import stages_of
from pipeline.config.deepspeed.defaults import DEFAULTS
from pipeline.config.deepspeed.ignored import IGNORED, OTHER_NAMES, is_comment
from pipeline.config.deepspeed.keys import (
    REFUSED,
    REFUSED_BF16,
    REFUSED_COMPILE,
    REFUSED_EXPERT_PARALLEL,
    REFUSED_FP16,
    REFUSED_OPTIMIZER_PARAMS,
    REFUSED_PIPELINE,
    REFUSED_SCHEDULER_PARAMS,
    REFUSED_TENSOR_PARALLEL,
    REFUSED_ZERO,
)
from pipeline.config.foreign_names import find_name
from pipeline.config.sections.optimizers import OPTIMIZERS, REFUSED_TYPES
from pipeline.config.sections.run import Config


@dataclass(frozen=True)
class Translated:
    """A config with DeepSpeed's keys, translated to the schema.

    Attributes:
        raw: the config with "auto" replaced, without the ignored and refused keys.
        ignored: "key = value" of every key that changes nothing here.
        auto: "key = value" of every key that was "auto".
        refused: keys that are not supported.
    """

    raw: ConfigTree
    ignored: tuple[str, ...]
    auto: tuple[str, ...]
    refused: tuple[ConfigError, ...]


_OURS = frozenset(Config.model_fields)
_SECTIONS = (
    "zero_optimization",
    "bf16",
    "fp16",
    "optimizer",
    "scheduler",
    "tensor_parallel",
    "expert_parallel",
    "pipeline",
    "aio",
    "compile",
)

_REFUSED_BELOW = {
    "zero_optimization.": REFUSED_ZERO,
    "bf16.": REFUSED_BF16,
    "fp16.": REFUSED_FP16,
    "optimizer.params.": REFUSED_OPTIMIZER_PARAMS,
    "scheduler.params.": REFUSED_SCHEDULER_PARAMS,
    "compile.": REFUSED_COMPILE,
    "expert_parallel.": REFUSED_EXPERT_PARALLEL,
    "pipeline.": REFUSED_PIPELINE,
    "tensor_parallel.": REFUSED_TENSOR_PARALLEL,
}


def translate(raw: Mapping[str, Any], *, micro_batch: int | None = SAMPLES_PER_DEVICE) -> Translated:
    """Translates DeepSpeed's keys, as DeepSpeed and the Hugging Face Trainer mean them, to the schema.

    Args:
        raw: a whole config as parsed JSON, with overrides applied; it is not changed.
        micro_batch: micro-batch size where it is "auto" and no other batch size is given; None derives it later.
    """
    ignored: list[str] = []
    refused: list[ConfigError] = []
    named = _renamed("", raw, ignored, refused)
    ignored += _settle_clipping(named)
    refused += _refused_optimizer(named)
    kept = _sift("", named, ignored, refused)
    resolved, auto = resolve_auto(kept, micro_batch=micro_batch)
    auto += _decay_of_torch(resolved)
    resolved = _without_offload_to_none(resolved)
    if _offloads_no_parameters(resolved):
        ignored.append("zero_optimization.offload_param (no effect below stage 3)")
        del resolved["zero_optimization"]["offload_param"]
    return Translated(resolved, tuple(ignored), tuple(auto), tuple(refused))


def _offloads_no_parameters(raw: Mapping[str, Any]) -> bool:
    """Tells whether DeepSpeed accepts `offload_param` without effect: parameters are sharded only at stage 3."""
    zero = raw.get("zero_optimization")
    return isinstance(zero, dict) and zero.get("stage", 0) in (0, 1, 2) and isinstance(zero.get("offload_param"), dict)


def _renamed(at: str, section: Mapping[str, Any], ignored: list[str], refused: list[ConfigError]) -> ConfigTree:
    """Gives every key its name here; a key under both names is refused unless the values are equal."""
    kept: ConfigTree = {}
    for key, value in section.items():
        new = OTHER_NAMES.get(at + key, at + key)[len(at) :]
        below = f"{at}{new}."
        ours = below.split(".", maxsplit=1)[0] not in _SECTIONS
        inner = value if ours or not isinstance(value, dict) else _renamed(below, value, ignored, refused)
        if new == key or new not in section:
            kept[new] = inner
        elif value == section[new]:
            ignored.append(f"{at}{key} (as {at}{new})")
        else:
            why = f"it is another name of {at}{new}, which is given too, as {_json(section[new])}"
            refused.append(ConfigError(at + key, value, why=why, remedy=f"leave out one of the two, {at}{key} or it"))
    optimizer = kept.get("type") if at == "optimizer." else None
    if isinstance(optimizer, str):
        # DeepSpeed does not distinguish upper and lower case either
        kept["type"] = next((name for name in OPTIMIZERS if name.lower() == optimizer.lower()), optimizer)
    if at == "scheduler.params." and kept.get("warmup_num_steps") == 0 and "decay_num_steps" not in kept:
        kept["warmup_num_steps"] = 1  # no warmup: 1 is DeepSpeed's shortest
    return kept


def _refused_optimizer(raw: ConfigTree) -> list[ConfigError]:
    """Refuses a known but unsupported optimizer by name, and drops its section, whose keys are its own."""
    optimizer = raw.get("optimizer")
    given = optimizer.get("type") if isinstance(optimizer, dict) else None
    why, remedy = REFUSED_TYPES.get(given.lower(), ("", "")) if isinstance(given, str) else ("", "")
    if not why:
        return []
    del raw["optimizer"]
    return [ConfigError("optimizer.type", given, why=why, remedy=remedy)]


def _decay_of_torch(raw: ConfigTree) -> list[str]:
    """Sets the default decay of torch's AdamW, to which DeepSpeed hands the parameters with `torch_adam`."""
    optimizer = raw.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    if not isinstance(params, dict) or params.get("torch_adam") is not True or "weight_decay" in params:
        return []
    params["weight_decay"] = 0.01
    return ["optimizer.params.weight_decay = 0.01 (torch_adam)"]


def _settle_clipping(raw: ConfigTree) -> list[str]:
    """Drops `optimizer.params.max_grad_norm` where it equals `gradient_clipping`: Megatron writes both."""
    optimizer = raw.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    if not isinstance(params, dict) or "max_grad_norm" not in params:
        return []
    if params["max_grad_norm"] != raw.get("gradient_clipping", DEFAULTS["gradient_clipping"]):
        return []
    return [f"optimizer.params.max_grad_norm = {_json(params.pop('max_grad_norm'))}"]


def _sift(at: str, section: Mapping[str, Any], ignored: list[str], refused: list[ConfigError]) -> ConfigTree:
    kept: ConfigTree = {}
    table = _REFUSED_BELOW.get(at, REFUSED if not at else {})
    for key, value in section.items():
        path = at + key
        harmless = path in IGNORED and (value == "auto" or IGNORED[path](value))
        if harmless and path in _WITH_A_MEANING and value == "auto":
            harmless = False
        if harmless or (not at and is_comment(key)):
            ignored.append(path if isinstance(value, dict | list) or is_comment(key) else f"{path} = {_json(value)}")
        elif key in table:
            why = "no scheduler has it" if at == "scheduler.params." else "DeepSpeed's key, not supported here"
            stages = None if at or "stages with" not in table[key] else stages_of(key, value)
            remedy = _IN_STAGES.format(stages) if stages else table[key]
            refused.append(ConfigError(path, value, why=why, remedy=remedy))
        elif not at and key not in _OURS and (found := find_name(key)) is not None:
            refused.append(ConfigError(key, value, why=found.why, remedy=found.remedy(value)))
        elif isinstance(value, dict) and path.split(".")[0] in _SECTIONS:
            kept[key] = _sift(f"{path}.", value, ignored, refused)
        else:
            kept[key] = value
    return kept


_IN_STAGES = "remove it, and add {}: these read whole windows of each length, where DeepSpeed truncates longer samples"

_WITH_A_MEANING = frozenset({"steps_per_print", "tensor_parallel.autotp_size", "zero_optimization.overlap_comm"})
"""Keys of the schema with one value that is ignored."""


def _json(value: Any) -> str:
    return json.dumps(value, default=repr)


def _without_offload_to_none(raw: ConfigTree) -> ConfigTree:
    """Drops offload sections whose device is "none" or null, whatever their other keys."""
    zero = raw.get("zero_optimization")
    if not isinstance(zero, dict):
        return raw
    off = [
        key
        for key in ("offload_optimizer", "offload_param")
        if key in zero
        and (zero[key] is None or (isinstance(zero[key], dict) and zero[key].get("device", "none") in ("none", None)))
    ]
    return {**raw, "zero_optimization": {key: value for key, value in zero.items() if key not in off}}
