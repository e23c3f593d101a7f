"""Experimental: sets weights to zero, 2:4 or unstructured, by magnitude or by Wanda's score. The weights stay dense.

Wanda: score |W_oi| sqrt(mean of x_i^2), compared within each output row. Source: Sun et al. 2023 (arXiv:2306.11695),
section 3. Magnitude is compared within the matrix where the pattern is unstructured, as in Han et al. 2015
(arXiv:1506.02626); 2:4 compares any four neighbouring inputs of an output.

Shapes: O outputs, I inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pipeline.compress.pruning.config import MaskSection
from pipeline.compress.pruning.rules import PruningPlan
from pipeline.compress.pruning.selection import Kept

_LAYER = re.compile(r"^model\.(layers\.\d+)\.(?:mlp|block_sparse_moe|self_attn)\.(?:experts\.(\d+)\.)?(\w+)\.weight$")
_INNER, _BEFORE_FFN = ("down_proj", "w2"), ("gate_proj", "up_proj", "w1", "w3")


def mask_weights(plan: PruningPlan, kept: Kept, sums: Mapping[str, Tensor]) -> Callable[[str, Tensor], Tensor] | None:
    """What sets weights of the decoder layers to zero: called with a name in the source and the cut weight [O, I].

    Returns:
        None where the config asks for no mask.
    """
    section = plan.config.experimental
    if section is None:
        return None

    def change(name: str, weight: Tensor) -> Tensor:
        match = _LAYER.match(name)
        if match is None or weight.ndim != 2 or match[3] == "gate":  # the router
            return weight
        moments = None if section.method == "magnitude" else _input_moments(plan, kept, sums, name, match)
        return weight * mask_of(weight, section, moments).to(weight.dtype)

    return change


def mask_of(weight: Tensor, section: MaskSection, moments: Tensor | None) -> Tensor:
    """bool [O, I]: the weights that stay.

    Args:
        weight: [O, I].
        section: pattern, method, sparsity.
        moments: sums of squares of the inputs [I], for wanda.
    """
    score = weight.double().abs()
    if moments is not None:
        score = score * moments.sqrt()
    outputs, inputs = score.shape
    if section.pattern == "2:4":
        return _kept_per_row(score.reshape(-1, 4), 2).view(outputs, inputs)
    rows = score if section.method == "wanda" else score.reshape(1, -1)
    return _kept_per_row(rows, rows.shape[1] - round(rows.shape[1] * section.sparsity)).view(outputs, inputs)


def _kept_per_row(score: Tensor, count: int) -> Tensor:
    order = torch.argsort(score, dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, order, value=True)


def _input_moments(
    plan: PruningPlan, kept: Kept, sums: Mapping[str, Tensor], name: str, match: re.Match[str]
) -> Tensor:
    """Sums of squares of the inputs of a cut matrix [I]."""
    place, expert, kind = match.groups()
    key = f"{place}.heads.square" if kind == "o_proj" else f"{place}.ffn.square"
    if kind in _BEFORE_FFN:
        pre = f"model.{place}.pre_feedforward_layernorm.out.square"
        key = pre if pre in sums else f"model.{place}.post_attention_layernorm.out.square"
    elif kind not in _INNER and kind != "o_proj":
        key = f"model.{place}.input_layernorm.out.square"
    elif expert is not None:
        key = f"{place}.experts.ffn.square"
    moments = sums[key][int(expert)] if key.endswith("experts.ffn.square") else sums[key]
    tensor = plan.anatomy.tensors[name]
    axis, width = tensor.dims[1]
    units = None if axis is None else kept.of(axis, tensor.layer, tensor.expert)
    if units is None:
        return moments
    return moments.index_select(0, (units[:, None] * width + torch.arange(width)).view(-1))
