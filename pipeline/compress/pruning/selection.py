"""Selects the units to keep by the sums of `importance`: the most important ones, in their old order.

FFN channels are chosen in each layer (and each expert), key/value heads in each layer with the query heads of their
group, experts in each layer by routing mass, layers by their influence or loss, residual channels once for all. A
residual channel's score is the sum of its activations after the norms that read the residual stream. Each norm's scores
are divided by their mean: no norm counts more than another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.compress.pruning.axes import EXPERT_FFN, EXPERTS, FFN, GROUPS, HIDDEN, LAYERS, Anatomy
from pipeline.compress.pruning.search import Shape

_METRICS = {"mean_abs": "abs", "second_moment": "square"}


@dataclass(frozen=True)
class Kept:
    """Indices of the kept units, int64, ascending.

    Attributes:
        hidden: residual channels [D']; None for all.
        layers: decoder layers [L'].
        groups: layer -> key/value heads.
        experts: layer -> experts.
        ffn: (layer, expert or None) -> FFN channels.
    """

    hidden: Tensor | None
    layers: Tensor
    groups: Mapping[int, Tensor]
    experts: Mapping[int, Tensor]
    ffn: Mapping[tuple[int, int | None], Tensor]

    def of(self, axis: str, layer: int | None, expert: int | None) -> Tensor | None:
        """Kept units of an axis in a tensor; None for all."""
        if axis == HIDDEN:
            return self.hidden
        if layer is None:
            return None
        if axis == GROUPS:
            return self.groups.get(layer)
        if axis == EXPERTS:
            return self.experts.get(layer)
        return self.ffn.get((layer, expert))

    def summary(self) -> dict[str, Any]:
        """The kept units for the manifest, without the long lists of FFN channels."""
        of_layers = {"key_value_heads": self.groups, "experts": self.experts}
        told = {
            name: {str(n): each.tolist() for n, each in found.items()} for name, found in of_layers.items() if found
        }
        hidden = {} if self.hidden is None else {"hidden_channels": self.hidden.tolist()}
        return {"layers": self.layers.tolist(), **told, **hidden}


def select(sums: Mapping[str, Tensor], anatomy: Anatomy, shape: Shape, *, metric: str, depth: str) -> Kept:
    """Selects the units to keep.

    Args:
        sums: sums over all processes.
        anatomy: anatomy of the model.
        shape: axis -> size of the result.
        metric: "mean_abs" or "second_moment".
        depth: "block_influence" or "loss".
    """
    moment, sizes = _METRICS[metric], anatomy.sizes
    cut = {axis for axis, size in sizes.items() if shape[axis] < size}
    numbers = range(sizes[LAYERS])
    scores = (
        torch.stack([sums[f"layers.{n}.{'influence' if depth == 'block_influence' else 'without'}"] for n in numbers])
        if LAYERS in cut
        else None
    )
    layers = torch.arange(sizes[LAYERS]) if scores is None else top(scores.view(-1), shape[LAYERS])
    groups = {}
    if GROUPS in cut:
        groups = {n: top(_of_groups(sums[f"layers.{n}.heads.{moment}"], sizes[GROUPS]), shape[GROUPS]) for n in numbers}
    routed = [n for n in numbers if f"layers.{n}.experts.mass" in sums]
    experts = {n: top(sums[f"layers.{n}.experts.mass"], shape[EXPERTS]) for n in routed} if EXPERTS in cut else {}
    hidden = top(residual_scores(sums, moment), shape[HIDDEN]) if HIDDEN in cut else None
    return Kept(hidden, layers, groups, experts, _ffn(sums, anatomy, shape, moment))


def unseen_experts(sums: Mapping[str, Tensor], kept: Kept) -> list[tuple[int, int]]:
    """Kept experts, as (layer, expert), whose channels have to be ranked although no token reached them."""
    tokens = {place: sums.get(f"layers.{place[0]}.experts.tokens") for place in kept.ffn if place[1] is not None}
    return [
        (layer, expert)
        for (layer, expert), count in tokens.items()
        if expert is not None and count is not None and count[expert] == 0 and _is_kept(kept, layer, expert)
    ]


def _is_kept(kept: Kept, layer: int, expert: int) -> bool:
    experts = kept.experts.get(layer)
    return layer in kept.layers and (experts is None or expert in experts)


def top(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, ascending; the first among equal scores."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[:count].sort().values


def _of_groups(features: Tensor, groups: int) -> Tensor:
    """Scores of key/value heads: sums over all features of the query heads in each group."""
    return features.view(groups, -1).sum(1)


def residual_scores(sums: Mapping[str, Tensor], moment: str) -> Tensor:
    """Scores of the residual channels [D]."""
    post = any("pre_feedforward_layernorm" in key for key in sums)  # Gemma 2: this norm follows the attention
    found = [
        value
        for key, value in sorted(sums.items())
        if key.endswith(f".out.{moment}") and "post_feedforward" not in key and not (post and "post_attention" in key)
    ]
    return torch.stack([each / each.mean().clamp_min(torch.finfo(torch.float64).tiny) for each in found]).sum(0)


def _ffn(
    sums: Mapping[str, Tensor], anatomy: Anatomy, shape: Shape, moment: str
) -> dict[tuple[int, int | None], Tensor]:
    kept: dict[tuple[int, int | None], Tensor] = {}
    of_experts = EXPERT_FFN if EXPERT_FFN in anatomy.sizes else FFN
    for number in range(anatomy.sizes[LAYERS]):
        dense, routed = sums.get(f"layers.{number}.ffn.{moment}"), sums.get(f"layers.{number}.experts.ffn.{moment}")
        if dense is not None and FFN in shape and shape[FFN] < anatomy.sizes[FFN]:
            kept[number, None] = top(dense, shape[FFN])
        if routed is not None and shape[of_experts] < anatomy.sizes[of_experts]:
            kept |= {(number, expert): top(each, shape[of_experts]) for expert, each in enumerate(routed)}
    return kept
