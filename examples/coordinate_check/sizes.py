"""Runs of one config at several widths and depths, in one process: the same data, schedule and base model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from transformers import CONFIG_MAPPING

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.parametrization import BaseModelSection
from pipeline.config.sections.run import Config, ModelSection
from pipeline.engines.parametrization.kinds import FAMILIES

Name = Literal["standard", "completep"]
_DROPPED = ("parallel", "memory", "zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, order=True)
class Size:
    """Size of a model.

    Attributes:
        width: hidden size.
        depth: number of decoder layers.
    """

    width: int
    depth: int

    def __str__(self) -> str:
        return f"width {self.width}, depth {self.depth}"


@dataclass(frozen=True)
class Grid:
    """The sizes of a check. The config's own model.base is the base model of every size.

    Attributes:
        widths: hidden sizes, at the base model's depth.
        depths: numbers of decoder layers, at the base model's width.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]

    def sizes(self, base: Size) -> list[Size]:
        """All sizes, each once."""
        wide = [Size(width, base.depth) for width in self.widths]
        return sorted({*wide, *(Size(base.width, depth) for depth in self.depths)})


def check_config(model: ModelSection) -> Size:
    """Checks that a config allows models of several sizes; returns the size of the base model.

    Raises:
        ConfigError: the config has no CompleteP parametrization, or its model is loaded from a folder.
    """
    if model.config is None or model.parametrization != "completep" or model.base is None:
        why = "models of several sizes are made from model.config, and compared with model.base"
        remedy = 'give model.config, "parametrization": "completep" and model.base'
        raise ConfigError("model.parametrization", model.parametrization, why=why, remedy=remedy)
    if model.config["model_type"] not in FAMILIES:
        why = "it has no CompleteP rules"
        raise ConfigError(
            "model.config.model_type", model.config["model_type"], why=why, remedy=f"use {', '.join(FAMILIES)}"
        )
    return Size(_value(model, "hidden_size"), _value(model, "num_hidden_layers"))


def resized(
    config: Config,
    size: Size,
    *,
    parametrization: Name,
    lr: float | None,
    seed: int,
    steps: int,
    step_tokens: int = 1,
) -> ResolvedRun:
    """Resolves the run of one size on one process.

    Heads keep their size, and the proportions are those of the base model.

    Args:
        config: config that `check_config` accepts.
        size: width and depth of the model.
        parametrization: standard or completep; standard leaves out the base model.
        lr: peak learning rate; None for the config's rate.
        seed: seed of initialization and data order.
        steps: length of the run.
        step_tokens: fewest tokens of each step, reached by gradient accumulation over several of the config's batches.

    Raises:
        ConfigError: the width is not a multiple of a head, or `resolve` refuses the run.
    """
    raw = config.model_dump(mode="json", exclude_none=True)
    kept = {key: value for key, value in raw.items() if key not in _DROPPED}
    model = {
        **raw["model"],
        "config": _model(config.model, size),
        "parametrization": parametrization,
        "base": _base(config.model),
    }
    if parametrization == "standard":
        del model["base"]
    rates = config.optimizer.params.rates_at(lr) if lr else {}
    optimizer = {**raw["optimizer"], "params": {**raw["optimizer"]["params"], **rates}}
    length = {key: value for key, value in raw["run"].items() if key not in ("steps", "tokens", "dir")}
    run = {**length, "steps": steps, "seed": seed, "dir": f"{raw['run']['dir']}/none"}
    made = {**kept, "engine": "torch", "model": model, "optimizer": optimizer, "run": run}
    batch = config.train_batch_size
    if isinstance(batch, int):
        accumulated = math.ceil(step_tokens / (batch * config.data.sequence_length))
        made |= {"train_batch_size": batch * accumulated, "train_micro_batch_size_per_gpu": batch}
    return resolve(parse(Config, made), world_size=1)


def _base(model: ModelSection) -> dict[str, int]:
    """All sizes of the base model; sizes that it leaves out come from the config, not from the resized model."""
    return {key: value for key in BaseModelSection.model_fields if (value := _value(model, key)) is not None}


def _model(model: ModelSection, size: Size) -> dict[str, Any]:
    assert model.config is not None
    width, heads = _value(model, "hidden_size"), _value(model, "num_attention_heads")
    if size.width * heads % width:
        why = f"heads of {width // heads} dimensions do not divide it"
        near = max(round(size.width * heads / width), 1) * width // heads
        raise ConfigError("--widths", size.width, why=why, remedy=f"use {near}")
    given, names = model.config, CONFIG_MAPPING[model.config["model_type"]].attribute_map
    scaled = {"hidden_size": size.width}
    for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        value = _value(model, key)
        if value is not None:
            if size.width * value % width:
                why = f"{key} would be no whole number ({value} at width {width})"
                raise ConfigError("--widths", size.width, why=why, remedy=f"use a multiple of {width}")
            scaled[key] = size.width * value // width
    layers = {"num_hidden_layers": size.depth}
    return {**given, **{names.get(key, key): value for key, value in {**scaled, **layers}.items()}}


def _value(model: ModelSection, key: str) -> Any:
    """A size of the base model; None if the architecture's default derives it from other sizes."""
    assert model.config is not None
    assert model.base is not None
    value = getattr(model.base, key)
    if value is not None:
        return value
    given = model.config
    names = CONFIG_MAPPING[given["model_type"]].attribute_map
    found = given.get(key, given.get(names.get(key, key)))
    if found is None and key not in ("intermediate_size", "num_key_value_heads"):
        raise ConfigError(f"model.config.{key}", why="it is not given", remedy="give it, or its value in model.base")
    return found
