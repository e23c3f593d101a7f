"""Counts parameters and floating-point operations (FLOPs) per token of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig

from pipeline.config.rules.experts import experts_of
from pipeline.models.attention import window_of
from pipeline.models.layers import attention_widths, global_value, state_flops
from pipeline.models.multi_token import modules_of


@dataclass(frozen=True)
class ModelSize:
    """Counts of a model.

    Attributes:
        parameters: number of parameters; a tied parameter counts once.
        embedding: parameters of the input embedding.
        active: parameters that a token uses: all except those of routed experts not chosen for it.
        flops_per_token: FLOPs of one token, forward and backward (see `measure`); None without attention heads.
    """

    parameters: int
    embedding: int
    active: int
    flops_per_token: float | None

    def non_embedding(self, *, tied: bool) -> int:
        """Returns the number of active parameters without input embedding and output head.

        Args:
            tied: whether the head is the input embedding.
        """
        return self.active - (self.embedding if tied else 2 * self.embedding)


def measure(model: nn.Module, config: PretrainedConfig, *, sequence_length: int) -> ModelSize:
    """Counts parameters and FLOPs of a model on any device, including meta.

    FLOPs per token = 6 N + 12 L h s. N is the number of active parameters in matrix products: all but the input
    embedding (a tied embedding counts once, as the head), and k/E of the experts if a token goes to k of E. L is the
    number of layers, h the attention width (heads x head size), s the sequence length, or a layer's sliding window if
    that is shorter. Recurrent layers add three times `state_flops`. Causal masking is not subtracted. Modules for
    multi-token prediction count with their parameters, full attention and the head. Source: Chowdhery et al. 2022, PaLM
    (arXiv:2204.02311), appendix B.
    """
    parameters = sum(p.numel() for p in model.parameters())
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    embedding = int(math.prod(embeddings.weight.shape))
    tied = bool(getattr(config, "tie_word_embeddings", False))
    active = parameters - _inactive(model, config)
    multiplied = active if tied else active - embedding
    widths = attention_widths(config)
    if global_value(config, "num_attention_heads") is None:
        return ModelSize(parameters, embedding, active, None)
    spans = (min(window_of(config, index) or sequence_length, sequence_length) for index in range(len(widths)))
    attention = 12 * sum(width * span for width, span in zip(widths, spans, strict=True))
    attention += round(3 * sum(state_flops(config)))
    ahead = len(modules_of(model)) * (6.0 * embedding + 12.0 * max(widths, default=0) * sequence_length)
    return ModelSize(parameters, embedding, active, 6.0 * multiplied + attention + ahead)


def _inactive(model: nn.Module, config: PretrainedConfig) -> int:
    """Returns the number of parameters in routed experts not chosen for a token; shared experts are always active."""
    experts, chosen = experts_of(config.to_dict())
    if not experts or not chosen:
        return 0
    routed = sum(p.numel() for name, p in model.named_parameters() if "experts" in name.split("."))
    return routed - routed * chosen // experts
