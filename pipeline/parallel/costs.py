"""What the parts of a decoder cost: floating-point operations of a forward pass, per token."""

from __future__ import annotations

from typing import Any

from torch import nn

from pipeline.parallel.stages import layer_list


def forward_flops(model: nn.Module, *, sequence_length: int) -> tuple[list[float], float]:
    """FLOPs per token of every decoder layer and of the head.

    A layer is 2 N + 4 h s, N being its parameters and h its attention width over s positions (scores and values;
    causal masking is not subtracted); with a window, s is the window. The head is 2 V D. Of a mixture of experts only
    the experts that a token meets count. Source: as `models.count.measure`, forward pass only.

    Args:
        model: on any device.
        sequence_length: s.
    """
    config: Any = model.config
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None) or sequence_length
    flops: list[float] = []
    for number, layer in enumerate(layer_list(model)[1]):
        slides = number < len(kinds) and kinds[number] == "sliding_attention"
        seen = min(window, sequence_length) if slides else sequence_length
        flops.append(2.0 * _met(layer, config) + 4.0 * width * seen)
    return flops, 2.0 * config.vocab_size * config.hidden_size


def _met(layer: nn.Module, config: Any) -> float:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    share = config.num_experts_per_tok / experts if experts else 1.0
    return sum(p.numel() * (share if ".experts." in name else 1.0) for name, p in layer.named_parameters())
