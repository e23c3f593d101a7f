"""Cost model of decoder layers and pipeline stages: forward FLOPs per token, parameters, bytes of the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.parallel.stage_plan import stage_plan
from pipeline.engines.parallel.stages import StageLayers, layer_list
from pipeline.models.attention import window_of
from pipeline.models.layers import attention_widths, state_flops
from pipeline.models.multi_token import modules_of

UPDATE_BYTES = {True: 54, False: 32}
"""Bytes that an AdamW update reads and writes per parameter of a rank: True on one device, False on several. Weight,
gradient and two moments, in fp32, are read and written. One device in bf16 also joins and splits the master weights
(8), widens the gradient (6) and writes the result (8)."""
SMALL_MOMENTS_BYTES = 8
"""Bytes by which bf16 moments reduce `UPDATE_BYTES`."""
ACCUMULATION_BYTES = 10
"""Bytes per parameter and micro-batch to add an unsharded bf16 gradient to an fp32 sum. FSDP2 and ZeRO do so in a
pipeline; elsewhere they reduce the gradients of every micro-batch."""


def update_bytes(run: ResolvedRun, parameters: int, experts: int = 0) -> float:
    """Returns the bytes that a rank reads and writes in a step for the optimizer's update and to add up gradients.

    Args:
        run: the resolved config.
        parameters: elements of the rank's part of the model, before it is sharded over data ranks.
        experts: elements divided by expert parallelism, which are sharded over the ranks with the same experts.
    """
    topology, count = run.topology, run.batch.accumulation
    each = UPDATE_BYTES[run.alone]
    if run.config.optimizer.params.moments_dtype == "bf16":
        each -= SMALL_MOMENTS_BYTES
    sharded = not run.alone and run.config.zero_optimization.stage > 0
    shards = (run.config.parallel.hybrid_shard_size or topology.dp * topology.cp) if sharded else 1
    added = ACCUMULATION_BYTES * count if count > 1 and (run.alone or topology.pp > 1) else 0
    whole = parameters / shards + experts / (run.expert_shards if sharded else 1)
    return whole * each + (parameters + experts) * added


def forward_flops(model: nn.Module, *, sequence_length: int) -> tuple[list[float], float]:
    """Returns the forward FLOPs per token of every decoder layer, and of the head.

    A layer costs 2 N + 4 h s, with N parameters and attention width h over s positions (scores and values; causal
    masking is not subtracted); with a sliding window, s is the window; a recurrent layer adds `state_flops`. The head
    costs 2 V D. In a mixture of experts, only a token's active experts count. Modules for multi-token prediction have
    full attention and run the head again; they count as a part of the head. Source: as `models.count.measure`.

    Args:
        model: the full model, on any device.
        sequence_length: s.
    """
    config: Any = model.config
    widths, states = attention_widths(config), state_flops(config)
    flops: list[float] = []
    for index, layer in enumerate(layer_list(model)[1]):
        span = min(window_of(config, index) or sequence_length, sequence_length)
        flops.append(2.0 * _active_parameters(layer, config) + 4.0 * widths[index] * span + states[index])
    head = 2.0 * config.vocab_size * config.hidden_size
    scores = 4.0 * max(widths, default=0) * sequence_length
    ahead = [2.0 * _active_parameters(module, config) + scores + head for module in modules_of(model)]
    return flops, head + sum(ahead)


def expert_flops(model: nn.Module) -> list[float]:
    """Returns the forward FLOPs per token of the routed experts in every decoder layer, a part of `forward_flops`."""
    layers = layer_list(model)[1]
    config: Any = model.config
    whole = [sum(p.numel() for name, p in layer.named_parameters() if _routed(name)) for layer in layers]
    return [2.0 * each * _chosen_share(config) for each in whole]


def stage_parameters(model: nn.Module, stages: Sequence[StageLayers]) -> list[int]:
    """Counts the parameters of every stage; a head tied to the embedding counts in the first and the last stage."""
    plan = stage_plan(model)
    inside, before = f"{plan.layers}.", tuple(f"{name}." for name in plan.before)
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
    """Describes each stage in a line: layers, share of a forward pass, parameters and their bytes in the model's dtype.

    Args:
        model: the full model, on any device.
        stages: the model's pipeline stages, with their costs.
    """
    total = sum(stage.cost for stage in stages)
    bytes_each = next(model.parameters()).element_size()
    lines = []
    for stage, parameters in zip(stages, stage_parameters(model, stages), strict=True):
        first, end = stage.layers
        extra = [name for name, present in (("embedding", stage.first), ("head", stage.last)) if present]
        layers = [f"layers {first}-{end - 1}" if end - first > 1 else f"layer {first}"] if end > first else []
        modules = ", ".join([*layers, *extra])
        share = f"{stage.cost / total:.1%} of the FLOPs"
        size = f"{parameters:,} parameters ({parameters * bytes_each / 2**20:,.1f} MiB)"
        lines.append(f"stage {stage.index}: {modules}; {share}, {size}")
    return lines


def _active_parameters(layer: nn.Module, config: Any) -> float:
    """Counts the parameters of a layer that a token uses; of the experts, only the share to which it is routed."""
    share = _chosen_share(config)
    return sum(p.numel() * (share if _routed(name) else 1.0) for name, p in layer.named_parameters())


def _routed(name: str) -> bool:
    return ".experts." in f".{name}"


def _chosen_share(config: Any) -> float:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((n for n in (getattr(config, name, None) for name in names) if n), None)
    return config.num_experts_per_tok / experts if experts else 1.0
