"""Counts parameters and floating-point operations (FLOPs) per token of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig


@dataclass(frozen=True)
class ModelSize:
    """Counts of a model.

    Attributes:
        parameters: total; a tied parameter counts once.
        embedding: parameters of the input embedding.
        flops_per_token: forward and backward, see `measure`; None for an architecture without attention heads.
    """

    parameters: int
    embedding: int
    flops_per_token: float | None


def measure(model: nn.Module, config: PretrainedConfig, *, sequence_length: int) -> ModelSize:
    """Counts parameters and FLOPs of a model on any device, including meta.

    FLOPs per token = 6 N + 12 L h s, where N is the number of parameters in matrix products (all but the input
    embedding; a tied embedding counts once, as the head), L layers, h the attention width (heads x head size) and s the
    sequence length; causal masking is not subtracted. Source: Chowdhery et al. 2022, PaLM (arXiv:2204.02311),
    appendix B.
    """
    parameters = sum(p.numel() for p in model.parameters())
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    embedding = int(math.prod(embeddings.weight.shape))
    tied = bool(getattr(config, "tie_word_embeddings", False))
    multiplied = parameters if tied else parameters - embedding
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return ModelSize(parameters, embedding, None)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    attention = 12 * config.num_hidden_layers * width * sequence_length
    return ModelSize(parameters, embedding, 6.0 * multiplied + attention)
