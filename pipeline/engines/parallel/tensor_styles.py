"""Styles of tensor-parallel modules: which rows or features of a module a rank computes, and the modules that do so.

Shapes: B samples, T positions, D features.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.engines.parallel.collectives import all_gather
from pipeline.models.attention_adapters import TENSOR_PART

CONFIG, _CONFIG_HEADS = "config", ("num_attention_heads", "num_key_value_heads")
"""Attribute with the config from which Phi-3's attention reads its numbers of heads: a rank's block gets its own."""

WHOLE, COLWISE, ROWWISE, QKV, ONE_KEY, HALVES = "whole", "colwise", "rowwise", "qkv", "one key head", "halves"
"""Styles of linear layers. Of QKV, ONE_KEY and HALVES a rank keeps the whole weight and multiplies with its rows."""
SLICED = (QKV, ONE_KEY, HALVES)
HEADS, GATHERED = "heads", "gathered"
"""Styles of a parameter, of which a rank keeps the rows of its heads (attention sinks), and of a norm that needs the
features of all ranks, which gather them for it."""

NO_TABLE: Mapping[str, str] = MappingProxyType({})
"""Table of styles (`parallel.tp_plan`) of a run that has none."""


@dataclass(frozen=True)
class BlockPlan:
    """How a rank computes a block.

    Attributes:
        styles: name of a linear layer, norm or parameter within the block -> its style; empty for a block that runs
            whole.
        scaled: attributes of the block or its modules (module, attribute) that a rank divides by tp, e.g. numbers of
            heads.
        own_residual: whether hidden states that the block gets besides the first ones are those of a rank's own
            positions: Bloom's blocks add the residual to their output.
    """

    styles: Mapping[str, str]
    scaled: tuple[tuple[str, str], ...] = ()
    own_residual: bool = False

    def having(self, *styles: str) -> list[str]:
        """Returns the names that have one of some styles."""
        return [name for name, style in self.styles.items() if style in styles]


def sharded_size(block: nn.Module, name: str, style: str) -> int:
    """Returns the size of a block's module or parameter that tp has to divide."""
    if style == HEADS:
        return block.get_parameter(name).shape[0]
    module: Any = block.get_submodule(name)
    return module.weight.numel() if style == GATHERED else linear_sizes(module, style)[0]


def scale_attributes(block: nn.Module, plan: BlockPlan, *, rank: int, ranks: int) -> None:
    """Divides the attributes of a block that count heads or features, and marks its modules, in place."""
    for module in block.modules() if plan.styles else ():
        setattr(module, TENSOR_PART, (rank, ranks))
    for name, key in plan.scaled:
        module = block.get_submodule(name)
        value = getattr(module, key)
        if key != CONFIG:
            setattr(module, key, value // ranks)
            continue
        setattr(module, key, copy.copy(value))
        for count in _CONFIG_HEADS:
            if (getattr(value, count, None) or 1) > 1:
                setattr(getattr(module, key), count, getattr(value, count) // ranks)


def linear_sizes(linear: Any, style: str) -> tuple[int, int]:
    """Returns the size that a style shards and its dim of the weight; Conv1D (GPT-2) stores inputs first."""
    dim = int((style == ROWWISE) != isinstance(linear, Conv1D))
    return linear.weight.shape[dim], dim


def rank_rows(style: str, size: int, inside: int, *, rank: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Returns ranges (first, end) of the outputs of a linear layer that a rank computes, or of its rowwise inputs.

    Args:
        style: style of the layer.
        size: size of the sharded dim.
        inside: inputs of the block's rowwise layer: the width of all queries, or of an MLP.
        rank: this rank.
        ranks: number of ranks.
    """
    parts = {QKV: [inside, *[(size - inside) // 2] * 2], ONE_KEY: [inside], HALVES: [size // 2] * 2}.get(style, [size])
    starts = itertools.accumulate(parts, initial=0)
    found = [(at + rank * (n // ranks), at + (rank + 1) * (n // ranks)) for at, n in zip(starts, parts, strict=False)]
    return (*found, *([(sum(parts), size)] if sum(parts) < size else []))


def rows_of(tensor: Tensor, dim: int, ranges: tuple[tuple[int, int], ...]) -> Tensor:
    """Returns ranges (first, end) of a dim, one after another."""
    return torch.cat([tensor.narrow(dim, first, end - first) for first, end in ranges], dim)


class SlicedLinear(nn.Linear):
    """A linear layer with a whole weight, of whose outputs a rank computes some: `rows`."""

    rows: tuple[tuple[int, int], ...]

    def forward(self, features: Tensor) -> Tensor:
        """Computes a rank's outputs."""
        bias = None if self.bias is None else rows_of(self.bias, 0, self.rows)
        return nn.functional.linear(features, rows_of(self.weight, 0, self.rows), bias)


class SlicedConv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, sliced as in `SlicedLinear`."""

    rows: tuple[tuple[int, int], ...]

    def forward(self, features: Tensor) -> Tensor:
        """Computes a rank's outputs."""
        outputs: Tensor = features @ rows_of(self.weight, 1, self.rows) + rows_of(self.bias, 0, self.rows)
        return outputs


def slice_linear(linear: nn.Module, style: str, inside: int, *, rank: int, ranks: int) -> None:
    """Makes a linear layer compute a rank's rows, in place; see `rank_rows` for the arguments."""
    rows = rank_rows(style, linear_sizes(linear, style)[0], inside, rank=rank, ranks=ranks)
    linear.__class__ = SlicedConv1D if isinstance(linear, Conv1D) else SlicedLinear
    linear.rows = rows  # type: ignore[assignment]


def whole_features(group: dist.ProcessGroup, _norm: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook of a norm over all heads: gathers the features [B, T, D / tp] of all ranks."""
    return (all_gather(args[0], group, dim=-1), *args[1:])


def own_features(group: dist.ProcessGroup, _norm: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """Forward hook of a norm over all heads: returns the features [B, T, D / tp] of this rank's heads."""
    return output.chunk(group.size(), dim=-1)[group.rank()]
