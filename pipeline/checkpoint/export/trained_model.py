"""Builds the model that a checkpoint's manifest describes, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from foundation.directory import Manifest
from pipeline.models.construction.buffers import buffer_shapes
from pipeline.models.construction.meta import build_meta, parameter_shapes
from pipeline.models.hidden_matrices import MatrixForm, hidden_matrices


def trained_config(manifest: Manifest) -> PretrainedConfig:
    """Returns the Hugging Face config of the model."""
    stored: dict[str, Any] = _with_infinities(manifest.details["hf_config"])
    return AutoConfig.for_model(stored.pop("model_type"), **stored)


def _with_infinities(value: Any) -> Any:
    """Turns {"__float__": "Infinity"}, which transformers writes since JSON has no infinity, back into a float.

    Mamba-2's `time_step_limit` has one.
    """
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"].lower())
        return {key: _with_infinities(each) for key, each in value.items()}
    return [_with_infinities(each) for each in value] if isinstance(value, list) else value


def attention_implementation(manifest: Manifest) -> str:
    """Returns the attention implementation of the training; sdpa in place of flash attention, which needs a GPU.

    Eager where transformers has no sdpa for the architecture. In training, sdpa stands for headrace's own attention,
    and has no effect on a model without attention heads (Mamba-2, RWKV).
    """
    if str(manifest.config["model"]["attn_implementation"]) == "eager":
        return "eager"
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(trained_config(manifest)), None)
    return "sdpa" if getattr(architecture, "_supports_sdpa", True) else "eager"


def trained_model(manifest: Manifest, *, dtype: torch.dtype) -> nn.Module:
    """Returns the model, on the meta device.

    Raises:
        ConfigError: this version of transformers cannot build the model.
    """
    how: dict[str, Any] = {"attn_implementation": attention_implementation(manifest), "ahead": trained_ahead(manifest)}
    return build_meta(trained_config(manifest), dtype=dtype, **how)


def trained_ahead(manifest: Manifest) -> int:
    """Returns the number of modules for multi-token prediction; checkpoints older than the key have none."""
    section = (manifest.config.get("loss") or {}).get("mtp")
    return 0 if section is None else int(section["depth"])


def trained_shapes(manifest: Manifest) -> dict[str, torch.Size]:
    """Returns the full shape of every parameter, by name.

    Raises:
        ConfigError: this version of transformers cannot build the model.
    """
    return parameter_shapes(trained_model(manifest, dtype=torch.float32))


def trained_buffers(manifest: Manifest) -> dict[str, torch.Size]:
    """Returns the shape of every persistent buffer, by name.

    Raises:
        ConfigError: this version of transformers cannot build the model.
    """
    return buffer_shapes(trained_model(manifest, dtype=torch.float32))


def trained_matrices(manifest: Manifest) -> dict[str, MatrixForm]:
    """Returns the hidden matrices, which an optimizer like Muon treats differently, by parameter name.

    Raises:
        ConfigError: this version of transformers cannot build the model.
    """
    return hidden_matrices(trained_model(manifest, dtype=torch.float32))


def trained_positions(manifest: Manifest, model: nn.Module) -> int | None:
    """`max_position_embeddings` for an export: the longest sequence in training; None to keep the config's value.

    Only a value that `model.config` does not set is replaced: headrace then uses at least 2048, which readers of the
    export would mistake for the length that the model was trained on. The value stays if something depends on it: the
    size of a parameter or buffer (learned positions), or the scaling of rotary positions.
    """
    section = manifest.config["model"].get("config") or {}
    config = trained_config(manifest)
    given = config.max_position_embeddings if "max_position_embeddings" in config.to_dict() else None
    aliases = {"max_position_embeddings", config.attribute_map.get("max_position_embeddings")}
    if not section or given is None or aliases & section.keys():
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type", "default") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if kinds - {"default"} or any(given in tensor.shape for tensor in model.state_dict().values()):
        return None
    return int(manifest.config["data"]["sequence_length"])
