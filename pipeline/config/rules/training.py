"""Rules within the model, optimizer and run sections, for any layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError, found_by, refuse_all
from foundation.model_names import weight_file_problem
from foundation.paths import is_url
from pipeline.config.family_keys import key_problems
from pipeline.config.rules.experts import check_experts
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.config.sections.run import Config, ModelSection, MoeSection, RunSection


def check_model(model: ModelSection, *, sequence_length: int) -> None:
    """Checks the `model` section.

    Raises:
        ConfigError: there is not exactly one model, a field needs `model.path`, or `check_model_config` refuses the
            model.
    """
    if (model.config is None) == (model.path is None):
        why = "neither is given" if model.config is None else "both are given"
        raise ConfigError("model.config / model.path", why=why, remedy="give exactly one of the two")
    if model.path is not None and (problem := weight_file_problem(model.path)) and not Path(model.path).is_dir():
        raise ConfigError("model.path", model.path, why=problem[0], remedy=problem[1])
    if model.config is not None:
        for key in ("fresh", "keep_layers", "extra_weights"):
            if getattr(model, key) not in (False, None, "keep"):
                why = "it only applies to a model that is loaded from model.path"
                raise ConfigError(f"model.{key}", getattr(model, key), why=why, remedy="remove it, or use model.path")
        config = model.config
        found = [lambda: check_model_config(config, sequence_length=sequence_length)]
        refuse_all([*(key_problems(config) if "model_type" in config else ()), *found_by(found)])


def check_origin_and_ema(config: Config) -> None:
    """Checks `run.from` and `run.ema` against features that they do not combine with.

    Raises:
        ConfigError: master weights are on a disk between steps (EMA), or several groups of processes train the model.
    """
    zero, groups = config.zero_optimization, {"islands": config.islands, "replicas": config.replicas}
    on_disk = {"offload to NVMe": "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)}
    for key, given, others in (
        ("run.from", config.run.origin, groups),
        ("run.ema", config.run.ema, {**on_disk, **groups}),
    ):
        if given is not None and (found := [name for name, used in others.items() if used]):
            raise ConfigError(key, why=f"it does not combine with {found[0]}", remedy="remove one of the two")


def check_moe(moe: MoeSection) -> None:
    """Checks the `moe` section.

    Raises:
        ConfigError: a field has no effect with the chosen balance.
    """
    if moe.aux_loss_coef is not None and moe.balance == "none":
        why, remedy = "moe.balance is none", "set moe.balance to aux_loss, or remove it"
        raise ConfigError("moe.aux_loss_coef", moe.aux_loss_coef, why=why, remedy=remedy)
    if moe.bias_update_rate is not None and moe.balance != "bias":
        why, remedy = f"moe.balance is {moe.balance}", "set moe.balance to bias, or remove it"
        raise ConfigError("moe.bias_update_rate", moe.bias_update_rate, why=why, remedy=remedy)


def check_model_config(model: dict[str, Any], *, sequence_length: int) -> None:
    """Checks the integers of a Hugging Face config that all decoders have; keys that are absent are not checked.

    Raises:
        ConfigError: `model_type` is missing, heads do not divide, numbers of experts do not fit together, or the
            sequence is longer than the model's positions.
    """
    if not isinstance(model.get("model_type"), str):
        remedy = 'add "model_type": "llama" (or qwen3, mistral, gpt2, ...)'
        raise ConfigError(
            "model.config.model_type", model.get("model_type"), why="it has to name the architecture", remedy=remedy
        )
    refuse_all([*_size_problems(model)])
    refuse_all(
        found_by(
            [
                lambda: _check_heads(model),
                lambda: check_experts(model),
                lambda: _check_positions(model, sequence_length=sequence_length),
            ]
        )
    )


def _size_problems(model: dict[str, Any]) -> Iterator[ConfigError]:
    for key, value in model.items():
        counts = key.startswith("num_") or key.endswith("_size")
        whole = isinstance(value, int) and not isinstance(value, bool)
        if key in _SIZES and value is not None and not (whole and value > 0):
            why, remedy = "it is not a whole number above 0", "use 1 or more"
            yield ConfigError(f"model.config.{key}", value, why=why, remedy=remedy)
        elif counts and whole and value < 0:
            yield ConfigError(f"model.config.{key}", value, why="it is below 0", remedy="use 0 or more")


def _check_positions(model: dict[str, Any], *, sequence_length: int) -> None:
    # dynamic RoPE takes longer sequences; -1 is XLNet's value for no limit
    rope = model.get("rope_parameters") or model.get("rope_scaling")
    grows = isinstance(rope, dict) and "dynamic" in (rope.get("rope_type"), rope.get("type"))
    names = () if grows else POSITIONS
    limits = {name: model[name] for name in names if isinstance(model.get(name), int) and model[name] > 0}
    for name, positions in limits.items():
        if positions >= sequence_length:
            continue
        why = f"the model has {name} {positions}"
        remedy = f"use at most {positions}, or raise {name}"
        raise ConfigError("data.sequence_length", sequence_length, why=why, remedy=remedy)


def _check_heads(model: dict[str, Any]) -> None:
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    if hidden and heads and not model.get("head_dim") and hidden % heads:
        near = max(h for h in range(1, heads + 1) if hidden % h == 0)
        why = f"hidden_size {hidden} is not divisible by it"
        raise ConfigError("model.config.num_attention_heads", heads, why=why, remedy=f"use {near}, or set head_dim")
    inside = (model.get("attn_config") or {}).get("kv_n_heads")  # DBRX
    field = "attn_config.kv_n_heads" if inside else "num_key_value_heads"
    kv_heads = inside or model.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        near = max(h for h in range(1, min(kv_heads, heads) + 1) if heads % h == 0)
        why = f"num_attention_heads {heads} is not divisible by it"
        raise ConfigError(f"model.config.{field}", kv_heads, why=why, remedy=f"use {near}")


_SIZES = {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("d_model", "n_embd", "n_layer", "n_layers", "n_head", "n_heads"),
}
"""Sizes that every decoder has. Other counts may be 0 (`num_nextn_predict_layers`), or lists with an item per layer."""

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "context_length")
"""Config keys for an architecture's longest sequence, e.g. MPT's `max_seq_len`."""


def check_optimizer(optimizer: OptimizerSection) -> None:
    """Checks the `optimizer` section.

    Raises:
        ConfigError: the type does not have a parameter, Adam has L2 decay, a beta or momentum is outside [0, 1), or
            Nesterov momentum is on without momentum.
    """
    given, kind, params = optimizer.type, optimizer.kind, optimizer.params
    for name, value in params:
        if value is not None and name not in kind.parameters:
            remedy = f"remove it: {given} takes {', '.join(sorted(kind.parameters))}"
            raise ConfigError(f"optimizer.params.{name}", value, why=f"{given} has no such parameter", remedy=remedy)
    if given == "Adam" and not params.adam_w_mode:
        why = "Adam with L2 regularisation (adam_w_mode false) is not supported"
        raise ConfigError("optimizer.params.adam_w_mode", False, why=why, remedy="use type AdamW")
    if not all(0 <= beta < 1 for beta in params.betas or ()):
        why, remedy = "a beta must lie in [0, 1)", f"use {list(kind.usual_betas)}"
        raise ConfigError("optimizer.params.betas", params.betas, why=why, remedy=remedy)
    if params.momentum is not None and params.momentum >= 1:
        why = "momentum must lie in [0, 1)"
        raise ConfigError("optimizer.params.momentum", params.momentum, why=why, remedy="use 0.9")
    if params.nesterov and not params.momentum:
        why, remedy = "Nesterov momentum needs momentum", "add optimizer.params.momentum, e.g. 0.9"
        raise ConfigError("optimizer.params.nesterov", True, why=why, remedy=remedy)


def check_checkpoints(section: RunSection) -> None:
    """Checks keys that require, or exclude, `run.checkpoint_every` "auto" or a URL as `run.dir`.

    Raises:
        ConfigError: a key has no meaning with these values, or without them.
    """
    if section.keep_in_bucket is not None and not is_url(section.dir):
        why = f"run.dir is a path, {section.dir}: run.keep_checkpoints and run.keep_every decide there"
        raise ConfigError("run.keep_in_bucket", section.keep_in_bucket, why=why, remedy="remove it")
    auto = section.checkpoint_every == "auto"
    if section.node_mtbf_hours is not None and not auto:
        why = "only run.checkpoint_every auto decides by it"
        remedy = 'set run.checkpoint_every to "auto", or remove it'
        raise ConfigError("run.node_mtbf_hours", section.node_mtbf_hours, why=why, remedy=remedy)
    if section.keep_every is not None and auto:
        why = "checkpoints by time fall on any step, seldom on a multiple"
        remedy = "remove it, or set run.checkpoint_every to a number that divides it"
        raise ConfigError("run.keep_every", section.keep_every, why=why, remedy=remedy)
