"""Pre-flight check that a model draws no random numbers in training, on a tiny model of its architecture.

Each process draws from its own generator: with random numbers no two layouts would train the same model, and a resumed
run would not reproduce them. They are detected by their effect (two forward passes differ), not by the name of a key;
the routers of PhiMoE and Mixtral have jitter. The reference engine may draw random numbers: it seeds them by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from foundation.errors import ConfigError
from pipeline.engines.parallel.architecture_trial import random_model
from pipeline.models.construction.own_init import seeded
from pipeline.models.resize.shrink import shrink

_V, _T = 32, 16
_NO_RATES = ("norm", "range", "scale", "multiplier", "theta", "factor")
"""Words in the keys of small numbers that are not rates of random numbers."""


def check_random_numbers(config: PretrainedConfig, *, where: str) -> None:
    """Refuses a model whose forward pass in training is random.

    Args:
        config: the real model's Hugging Face config. If its tiny model cannot be built or run, other checks decide.
        where: name of the file or section in which keys are set, for the message.

    Raises:
        ConfigError: the model is random; names the keys that turn random numbers off.
    """
    try:
        small = shrink(config, divide=1, layers=2, vocab_size=_V)
        if not _random(small):
            return
    except Exception:  # each architecture fails in its own way; `check_architecture` reports it
        return
    why = "two forward passes of a tiny model in training differ: random numbers would depend on the layout"
    needed = _needed(small)
    if not needed:
        kind = config.model_type
        raise ConfigError("model.config.model_type", kind, why=why, remedy="use engine reference, which seeds them")
    zeros = ", ".join(f'"{key}": 0.0' for key in needed)
    value = dict(_rates(config.to_dict()))[needed[0]]
    raise ConfigError(f"model.config.{needed[0]}", value, why=why, remedy=f"set {zeros} in {where}")


def _needed(small: PretrainedConfig) -> list[str]:
    """Returns the rates that have to be 0 for equal passes; none if no rates turn random numbers off."""
    keys = [key for key, _ in _rates(small.to_dict())]
    if _still_random(small, keys):
        return []
    for key in list(keys):
        others = [each for each in keys if each != key]
        if not _still_random(small, others):
            keys = others
    return keys


def _still_random(small: PretrainedConfig, keys: Sequence[str]) -> bool:
    """Whether a model with these keys at 0 is random, or cannot be built."""
    fields = small.to_dict()
    for key in keys:
        *sections, last = key.split(".")
        section = fields
        for name in sections:
            section = section[name]
        section[last] = 0.0
    try:
        return _random(type(small).from_dict(fields))
    except Exception:  # each architecture validates in its own way
        return True


def _rates(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields numbers between 0 and 1 in a config and its sections."""
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from _rates(value, f"{prefix}{key}.")
        elif isinstance(value, float) and 0 < value < 1 and not any(word in key for word in _NO_RATES):
            yield prefix + key, value


@torch.no_grad()
def _random(small: PretrainedConfig) -> bool:
    """Whether two forward passes in training have different logits."""
    model = random_model(small).train()
    ids = torch.arange(_T)[None] % _V
    with seeded(0):
        first, second = (_logits(model, ids) for _ in range(2))
    return not torch.equal(first, second)


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.nan_to_num()
