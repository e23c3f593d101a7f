"""Builds a Hugging Face decoder on the meta device: names, shapes and code, without memory for weights."""

from __future__ import annotations

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig

from foundation.errors import ConfigError
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.attention_adapters import adapt, is_adapted
from pipeline.models.construction.buffers import frozen_to_buffers, keep_in_fp32
from pipeline.models.flash_attention import install_remedy
from pipeline.models.hf_config import one_line


def build_meta(config: PretrainedConfig, *, dtype: torch.dtype, attn_implementation: str, ahead: int = 0) -> nn.Module:
    """Builds `AutoModelForCausalLM` for a config on the meta device; tied parameters are one object.

    Args:
        config: any decoder-only architecture that transformers knows.
        dtype: dtype of every parameter.
        attn_implementation: transformers' name of the attention implementation. Eager attention, which computes the
            same, replaces sdpa where transformers has no sdpa for the architecture.
        ahead: number of modules for multi-token prediction to attach (`models.multi_token`).

    Raises:
        ConfigError: transformers has no causal language model for the config, or refuses its values, or
            `attach_modules` refuses the architecture.
    """
    if attn_implementation == "sdpa" and not _has_sdpa(config):
        attn_implementation = "eager"
    try:
        with torch.device("meta"):
            # with None, the default, transformers would ask whether to execute code that config.json names
            adapted = attn_implementation == ATTENTION_NAME and is_adapted(config)
            built_with = "eager" if adapted else attn_implementation
            how = {"attn_implementation": built_with, "trust_remote_code": False}
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **how)
    except (StrictDataclassError, ValueError, TypeError, KeyError, ImportError, AttributeError, RuntimeError) as error:
        why = f"transformers refuses it: {one_line(error)}"
        if attn_implementation != "eager" and _builds(config, dtype):
            remedy = install_remedy(attn_implementation) or _EAGER
            given = "sdpa" if attn_implementation == ATTENTION_NAME else attn_implementation  # the config's name
            raise ConfigError("model.attn_implementation", given, why=why, remedy=remedy) from None
        raise ConfigError("model.config", config.model_type, why=why, remedy="check the model section") from None
    if adapted:
        adapt(model)
    model.config.use_cache = False
    frozen_to_buffers(model)
    keep_in_fp32(model)
    assert isinstance(model, nn.Module)
    if ahead:
        from pipeline.models.multi_token import attach_modules  # noqa: PLC0415

        attach_modules(model, depth=ahead)
    return model


def _has_sdpa(config: PretrainedConfig) -> bool:
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(architecture, "_supports_sdpa", True))


_EAGER = "use eager (without data.mask_documents, parallel.cp and parallel.tp, which need sdpa)"


def _builds(config: PretrainedConfig, dtype: torch.dtype) -> bool:
    """Whether the model can be built with eager attention."""
    try:
        build_meta(config, dtype=dtype, attn_implementation="eager")
    except ConfigError:
        return False
    return True


def parameter_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Returns the full shape of every parameter, by name; a tied parameter appears once, under its first name."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}
