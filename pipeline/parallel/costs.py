"""What the parts of a decoder cost: floating-point operations of a forward pass per token, and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipeline.parallel.stages import StageLayers, layer_list, placed_before_layers


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
    flops: list[float] = []
    for number, layer in enumerate(layer_list(model)[1]):
        seen = min(window_of(config, number) or sequence_length, sequence_length)
        flops.append(2.0 * _met(layer, config) + 4.0 * width * seen)
    return flops, 2.0 * config.vocab_size * config.hidden_size


def stage_parameters(model: nn.Module, stages: Sequence[StageLayers]) -> list[int]:
    """Parameters that every stage holds; a head tied to the embedding counts in the first stage and in the last."""
    layers, _ = layer_list(model)
    inside, before = (
        f"{model.base_model_prefix}.{layers}.",
        tuple(f"{model.base_model_prefix}.{name}." for name in placed_before_layers(model)),
    )
    counts = [0] * len(stages)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(inside):
            number = int(name.removeprefix(inside).split(".")[0])
            index = next(s.index for s in stages if s.layers[0] <= number < s.layers[1])
        else:
            index = 0 if name.startswith(before) else len(stages) - 1
        counts[index] += parameter.numel()
    if len(stages) == 1:
        return [sum(p.numel() for p in model.parameters())]
    return counts


def describe(model: nn.Module, stages: Sequence[StageLayers]) -> list[str]:
    """One line per stage: its layers, its share of a forward pass, its parameters and their bytes in the model's dtype.

    Args:
        model: whole, on any device.
        stages: of it, with their costs.
    """
    total = sum(stage.cost for stage in stages)
    width = next(model.parameters()).element_size()
    lines = []
    for stage, parameters in zip(stages, stage_parameters(model, stages), strict=True):
        first, end = stage.layers
        ends = [name for name, there in (("embedding", stage.first), ("head", stage.last)) if there]
        what = ", ".join([f"layers {first}-{end - 1}" if end - first > 1 else f"layer {first}", *ends])
        share = f"{stage.cost / total:.1%} of the FLOPs"
        size = f"{parameters:,} parameters ({parameters * width / 2**20:,.1f} MiB)"
        lines.append(f"stage {stage.index}: {what}; {share}, {size}")
    return lines


def window_of(config: Any, number: int) -> int | None:
    """Positions that the queries of a layer see, by a Hugging Face config; None for all."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return window if kinds[number] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None


def _met(layer: nn.Module, config: Any) -> float:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((n for n in (getattr(config, name, None) for name in names) if n), None)
    share = config.num_experts_per_tok / experts if experts else 1.0
    return sum(p.numel() * (share if ".experts." in f".{name}" else 1.0) for name, p in layer.named_parameters())
