"""Rules within the model, optimizer and mixed-precision sections, whatever the layout."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import ConfigError
from pipeline.config.schema import Config


def check_model(config: Config) -> None:
    """Checks the `model` section.

    Raises:
        ConfigError: not exactly one model, a field that needs `model.path`, or what `check_model_config` refuses.
    """
    model = config.model
    if (model.config is None) == (model.path is None):
        why = "neither is given" if model.config is None else "both are given"
        raise ConfigError("model.config / model.path", why=why, remedy="give exactly one of the two")
    if model.config is not None:
        for key in ("fresh", "keep_layers"):
            if getattr(model, key):
                why = "it only applies to a model that is loaded from model.path"
                raise ConfigError(f"model.{key}", getattr(model, key), why=why, remedy="remove it, or use model.path")
        check_model_config(model.config, sequence_length=config.data.sequence_length)


def check_model_config(model: dict[str, Any], *, sequence_length: int) -> None:
    """Checks the integers of a Hugging Face config that all decoders have; keys that are absent are not checked.

    Raises:
        ConfigError: no `model_type`; heads that do not divide; a sequence longer than the model's positions.
    """
    if not isinstance(model.get("model_type"), str):
        remedy = 'add "model_type": "llama" (or qwen3, mistral, gpt2, ...)'
        raise ConfigError(
            "model.config.model_type", model.get("model_type"), why="it has to name the architecture", remedy=remedy
        )
    for key, value in model.items():
        whole = key.startswith("num_") or key.endswith("_size")
        if whole and value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(
                f"model.config.{key}", value, why="it is not a whole number above 0", remedy="use 1 or more"
            )
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    kv_heads = model.get("num_key_value_heads")
    if hidden and heads and not model.get("head_dim") and hidden % heads:
        near = max(h for h in range(1, heads + 1) if hidden % h == 0)
        why = f"hidden_size {hidden} is not divisible by it"
        raise ConfigError("model.config.num_attention_heads", heads, why=why, remedy=f"use {near}, or set head_dim")
    if heads and kv_heads and heads % kv_heads:
        near = max(h for h in range(1, min(kv_heads, heads) + 1) if heads % h == 0)
        why = f"num_attention_heads {heads} is not divisible by it"
        raise ConfigError("model.config.num_key_value_heads", kv_heads, why=why, remedy=f"use {near}")
    positions = model.get("max_position_embeddings")
    if positions and positions < sequence_length:
        why = f"the model has max_position_embeddings {positions}"
        remedy = f"use at most {positions}, or raise max_position_embeddings"
        raise ConfigError("data.sequence_length", sequence_length, why=why, remedy=remedy)


def check_optimizer(config: Config) -> None:
    """Checks the `optimizer` section.

    Raises:
        ConfigError: Adam with L2, or a beta outside [0, 1).
    """
    if config.optimizer.type == "Adam" and not config.optimizer.params.adam_w_mode:
        why = "Adam with L2 regularisation (adam_w_mode false) is not supported"
        raise ConfigError("optimizer.params.adam_w_mode", False, why=why, remedy="use type AdamW")
    for beta in config.optimizer.params.betas:
        if not 0 <= beta < 1:
            why = "a beta must lie in [0, 1)"
            raise ConfigError(
                "optimizer.params.betas", config.optimizer.params.betas, why=why, remedy="use [0.9, 0.95]"
            )


def check_precision(config: Config) -> None:
    """Checks that one precision is selected, and that the dtype of gradient accumulation fits it.

    Raises:
        ConfigError: bf16 and fp16 together; gradients accumulated in bf16 in a run that is not bf16.
    """
    if config.bf16.enabled and config.fp16.enabled:
        why = "bf16.enabled is true, too, and weights have one dtype"
        raise ConfigError("fp16.enabled", True, why=why, remedy="keep bf16 (it needs no loss scaling), or only fp16")
    if config.data_types.grad_accum_dtype == "bf16" and not config.bf16.enabled:
        why = f"gradients of an {'fp16' if config.fp16.enabled else 'fp32'} run are accumulated in fp32"
        raise ConfigError("data_types.grad_accum_dtype", "bf16", why=why, remedy="remove it, or enable bf16")
