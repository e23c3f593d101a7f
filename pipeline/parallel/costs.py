"""Cost model of decoder layers and pipeline stages: forward FLOPs per token, and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipeline.models.attention import window_of
from pipeline.models.layers import attention_widths
from pipeline.parallel.stages import StageLayers, layer_list, modules_before_layers


def forward_flops(model: nn.Module, *, sequence_length: int) -> tuple[list[float], float]:
    """FLOPs per token of every decoder layer and of the head.

    A layer costs 2 N + 4 h s, with N parameters and attention width h over s positions (scores and values; causal
    masking is not subtracted); with a sliding window, s is the window. The head costs 2 V D. Of a mixture of experts,
    only the active experts of a token count. Source: as `models.count.measure`, forward pass only.

    Args:
        model: on any device.
        sequence_length: s.
    """
    config: Any = model.config
    widths = attention_widths(config)
    flops: list[float] = []
    for index, layer in enumerate(layer_list(model)[1]):
        span = min(window_of(config, index) or sequence_length, sequence_length)
        flops.append(2.0 * _active_parameters(layer, config) + 4.0 * widths[index] * span)
    return flops, 2.0 * config.vocab_size * config.hidden_size


def stage_parameters(model: nn.Module, stages: Sequence[StageLayers]) -> list[int]:
    """Parameters of every stage; a head tied to the embedding counts in the first stage and in the last."""
    layers, _ = layer_list(model)
    inside, before = (
        f"{model.base_model_prefix}.{layers}.",
        tuple(f"{model.base_model_prefix}.{name}." for name in modules_before_layers(model)),
    )
    counts = [0] * len(stages)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(inside):
            layer = int(name.removeprefix(inside).split(".")[0])
            stage = next(s.index for s in stages if s.layers[0] <= layer < s.layers[1])
        else:
            stage = 0 if name.startswith(before) else len(stages) - 1
        counts[stage] += parameter.numel()
    if len(stages) == 1:
        return [sum(p.numel() for p in model.parameters())]
    return counts


def describe_stages(model: nn.Module, stages: Sequence[StageLayers]) -> list[str]:
    """One line per stage: its layers, its share of a forward pass, its parameters and their bytes in the model's dtype.

    Args:
        model: the full model, on any device.
        stages: of the model, with their costs.
    """
    total = sum(stage.cost for stage in stages)
    bytes_each = next(model.parameters()).element_size()
    lines = []
    for stage, parameters in zip(stages, stage_parameters(model, stages), strict=True):
        first, end = stage.layers
        extra = [name for name, present in (("embedding", stage.first), ("head", stage.last)) if present]
        modules = ", ".join([f"layers {first}-{end - 1}" if end - first > 1 else f"layer {first}", *extra])
        share = f"{stage.cost / total:.1%} of the FLOPs"
        size = f"{parameters:,} parameters ({parameters * bytes_each / 2**20:,.1f} MiB)"
        lines.append(f"stage {stage.index}: {modules}; {share}, {size}")
    return lines


def _active_parameters(layer: nn.Module, config: Any) -> float:
    """Parameters of a layer that a token uses: of the experts, the share that it is routed to."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((n for n in (getattr(config, name, None) for name in names) if n), None)
    share = config.num_experts_per_tok / experts if experts else 1.0
    return sum(p.numel() * (share if ".experts." in f".{name}" else 1.0) for name, p in layer.named_parameters())
