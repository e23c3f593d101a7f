"""`"auto"` in DeepSpeed's sections: filled in as by the Hugging Face Trainer, where the key has a meaning here.

The Trainer takes these values from its command line. Here each becomes the default of the Trainer's argument, and is
listed when a run is checked and started. Source: transformers `integrations/deepspeed.py` and `training_args.py`
(learning_rate 5e-5, max_grad_norm 1, no warmup, 8 samples per device). One choice is our own: mixed precision is bf16,
unless the file asks for fp16 or turns bf16 off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundation.configfile import ConfigTree
from foundation.errors import DataError
from foundation.foreign_json import read_json
from pipeline.config.sections.optimizers import OPTIMIZERS

OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "zero_optimization",
    "bf16",
    "fp16",
    "data_types",
    "tensor_parallel",
    "expert_parallel",
    "pipeline",
    "aio",
    "steps_per_print",
    "wall_clock_breakdown",
)
"""Top-level keys in which "auto" has the Trainer's meaning. In headrace's own sections "auto" means an absent key,
except for `_OWN_AUTO`."""

_OWN_AUTO = frozenset({"run.checkpoint_every", "parallel.shares"})
"""Keys of our own for which "auto" is a value of its own rather than the default."""

_TRAINER: ConfigTree = {
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_num_steps": 1,
}
_DERIVED = {
    "train_batch_size": "micro-batch x accumulation x data-parallel ranks",
    "train_micro_batch_size_per_gpu": "derived from the other batch sizes",
    "gradient_accumulation_steps": "derived from the batch sizes, 1 where they leave it open",
    "scheduler.params.warmup_max_lr": "optimizer.params.lr",
    "scheduler.params.total_num_steps": "the steps of the run",
}
_NEEDED = frozenset({"zero_optimization.stage", "optimizer.type", "scheduler.type"})
"""Keys for which the Trainer has no "auto" either: the text stays, and validation refuses its type."""

SAMPLES_PER_DEVICE = 8
"""The Trainer's default per_device_train_batch_size."""


def with_optimizer(raw: Mapping[str, Any]) -> ConfigTree:
    """Adds the Trainer's optimizer to a config without that section, which files of Trainer users leave out."""
    absent = [path.removeprefix("optimizer.params.") for path in _TRAINER if path.startswith("optimizer.")]
    return {"optimizer": {"params": dict.fromkeys(absent, "auto")}, **raw}


def resolve_auto(
    raw: Mapping[str, Any], *, micro_batch: int | None = SAMPLES_PER_DEVICE
) -> tuple[ConfigTree, list[str]]:
    """Replaces "auto" in DeepSpeed's sections.

    Args:
        raw: a whole config under today's key names; it is not changed.
        micro_batch: micro-batch size where it is "auto" and no other batch size is given; None derives it later.

    Returns:
        The config without "auto", and one text "key = value" per key that was "auto".
    """
    found = {key: _AUTO for key in OWNED if raw.get(key) == "auto"}
    for key in OWNED:
        if isinstance(raw.get(key), dict):
            found.update({f"{key}.{path}": _AUTO for path in _auto_paths(raw[key])})
    named = [path for path in found if path not in _NEEDED]
    values = {**_trainer(raw), **_sizes(raw), **_precision(raw, named), **_batch(raw, named, micro_batch)}
    ours = {key: _left_out(value, at=key) for key, value in raw.items() if key not in OWNED and value != "auto"}
    resolved = {**ours, **_without({key: value for key, value in raw.items() if key in OWNED}, named)}
    resolved = {key: resolved[key] for key in raw if key in resolved}
    listed = []
    for path in named:
        if path in values:
            _put(resolved, path, values[path])
        shown = json.dumps(values[path]) if path in values else _DERIVED.get(path, "its default")
        listed.append(f"{path} = {shown}")
    for path in values.keys() - set(named):
        mixed = path == "bf16.enabled" and any(name.endswith("16.enabled") for name in named)
        if mixed or path == "train_micro_batch_size_per_gpu":
            _put(resolved, path, values[path])
            listed.append(f"{path} = {json.dumps(values[path])}")
    return resolved, listed


_AUTO = object()


def _trainer(raw: Mapping[str, Any]) -> ConfigTree:
    """Returns the Trainer's values; parameters that the optimizer's type does not have are left out."""
    optimizer, at = raw.get("optimizer"), "optimizer.params."
    kind = optimizer.get("type", "AdamW") if isinstance(optimizer, dict) else "AdamW"
    taken = OPTIMIZERS[kind].parameters if isinstance(kind, str) and kind in OPTIMIZERS else None
    return {
        path: value
        for path, value in _TRAINER.items()
        if taken is None or not path.startswith(at) or path.removeprefix(at) in taken
    }


def _auto_paths(section: Mapping[str, Any]) -> list[str]:
    paths: list[str] = []
    for key, value in section.items():
        if value == "auto":
            paths.append(key)
        elif isinstance(value, dict):
            paths.extend(f"{key}.{below}" for below in _auto_paths(value))
    return paths


def _left_out(section: Any, *, at: str) -> Any:
    """Drops keys whose "auto" means no key from one of our sections, but not from a Hugging Face config inside it."""
    if not isinstance(section, dict):
        return section
    return {
        key: value if key == "config" else _left_out(value, at=f"{at}.{key}")
        for key, value in section.items()
        if value != "auto" or f"{at}.{key}" in _OWN_AUTO
    }


def _without(raw: Mapping[str, Any], paths: list[str]) -> ConfigTree:
    kept: ConfigTree = {}
    for key, value in raw.items():
        if key in paths:
            continue
        below = [path[len(key) + 1 :] for path in paths if path.startswith(f"{key}.")]
        kept[key] = _without(value, below) if below and isinstance(value, dict) else value
    return kept


def _put(raw: ConfigTree, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        raw = raw.setdefault(key, {})
    raw[last] = value


def _precision(raw: Mapping[str, Any], named: list[str]) -> ConfigTree:
    """Selects bf16, unless the file settles bf16 or fp16. Without "auto" nothing is decided here."""
    if not {"bf16.enabled", "fp16.enabled"} & set(named):
        return {}
    given = {name: _enabled(raw, name) for name in ("bf16", "fp16")}
    bf16 = given["bf16"] if isinstance(given["bf16"], bool) else given["fp16"] is not True
    fp16 = given["fp16"] if isinstance(given["fp16"], bool) else not bf16
    if not all(isinstance(raw.get(name, {}), dict) for name in ("bf16", "fp16")):
        return {"fp16.enabled": fp16} if isinstance(raw.get("fp16"), dict) else {"bf16.enabled": bf16}
    return {"bf16.enabled": bf16, "fp16.enabled": fp16}


def _enabled(raw: Mapping[str, Any], name: str) -> Any:
    section = raw.get(name)
    return section.get("enabled") if isinstance(section, dict) else None


def _batch(raw: Mapping[str, Any], named: list[str], size: int | None) -> ConfigTree:
    total, micro, accumulation = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    open_ = all(key in named or raw.get(key) is None for key in (total, micro))
    asked = any(key in named for key in (total, micro, accumulation))
    return {micro: size} if size is not None and open_ and asked else {}


def _sizes(raw: Mapping[str, Any]) -> ConfigTree:
    """Derives bucket sizes from the model's hidden size D like the Trainer: D x D, 0.9 x D x D and 10 x D elements."""
    hidden = _hidden_size(raw.get("model"))
    if hidden is None or raw.get("engine") == "torch":  # FSDP2 has no bucket sizes
        return {}
    reduce = {"zero_optimization.reduce_bucket_size": hidden * hidden}
    zero = raw.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") != 3:  # the Trainer fills in the other sizes only at stage 3
        return reduce
    return {
        **reduce,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden,
    }


def _hidden_size(model: Any) -> int | None:
    if not isinstance(model, dict):
        return None
    config = model.get("config")
    if config is None and isinstance(model.get("path"), str):
        try:
            config = read_json(Path(model["path"]) / "config.json")
        except (OSError, DataError):  # reported where the model is opened
            return None
    for each in (config, config.get("text_config") if isinstance(config, dict) else None):
        for key in ("hidden_size", "n_embd", "d_model"):
            size = each.get(key) if isinstance(each, dict) else None
            if isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 24:
                return size
    return None
