"""Divides the heads of a recurrent block: a rank runs the block's own code on its part of the whole weights.

A table says which rows of which parameter belong to heads, groups or channels. The rank's forward pass is that of a
copy of the block with fewer heads, whose parameters are views of the whole ones at the time of the call, so that an
engine may gather them before it. The output is the rank's summand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

_ALL, _WHOLE, _OUTPUT = ("all",), ("whole",), ("output",)
"""Rows of a parameter: all are divided, none are, or it is the output projection, whose inputs are divided."""
_GROUPS = "groups"
"""Segment of Mamba-2's B or C, one for each group of heads: whole on every rank if there is one group."""
_GATED_DELTA = ("key_dim", "key_dim", "value_dim")
_TABLE: tuple[Mapping[str, tuple[str, ...]], ...] = (
    {  # Mamba-2 (arXiv:2405.21060)
        "in_proj": ("intermediate_size", "intermediate_size", _GROUPS, _GROUPS, "num_heads"),
        "mup_vector": ("intermediate_size", "intermediate_size", _GROUPS, _GROUPS, "num_heads"),
        "conv1d": ("intermediate_size", _GROUPS, _GROUPS),
        **dict.fromkeys(("dt_bias", "A_log", "D", "norm"), _ALL),
        "out_proj": _OUTPUT,
    },
    {  # gated delta rule (arXiv:2412.06464): Qwen3-Next, Qwen3.5, OLMo-hybrid
        "in_proj_qkv": _GATED_DELTA,
        "conv1d": _GATED_DELTA,
        **dict.fromkeys(("in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_a", "in_proj_b"), _ALL),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "dt_bias", "A_log"), _ALL),
        **dict.fromkeys(("norm", "o_norm"), _WHOLE),
        **dict.fromkeys(("out_proj", "o_proj"), _OUTPUT),
    },
    {  # Kimi Delta Attention (arXiv:2510.26692)
        "conv1d": ("qkv_dim", "qkv_dim", "qkv_dim"),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "b_proj", "g_proj", "g_b_proj"), _ALL),
        **{f"forget_gate.{name}": _ALL for name in ("f_proj", "f_b_proj", "dt_bias", "A_log")},
        **dict.fromkeys(("g_a_proj", "forget_gate.f_a_proj", "o_norm"), _WHOLE),
        "o_proj": _OUTPUT,
    },
    {  # RG-LRU (arXiv:2402.19427)
        **dict.fromkeys(("linear_x", "linear_y", "conv_1d", "rg_lru.recurrent_param"), _ALL),
        **dict.fromkeys(("rg_lru.input_gate_weight", "rg_lru.input_gate_bias"), _ALL),
        **dict.fromkeys(("rg_lru.recurrent_gate_weight", "rg_lru.recurrent_gate_bias"), _ALL),
        "linear_out": _OUTPUT,
    },
    {"in_proj": ("channels", "channels", "channels"), "conv": _ALL, "out_proj": _OUTPUT},  # short convolution (LFM2)
)
_COUNTS = (
    *("num_heads", "num_k_heads", "num_v_heads", "num_attention_heads"),
    *("intermediate_size", "key_dim", "value_dim", "qkv_dim", "lru_width"),
)
"""Attributes of a block and its modules that a rank divides."""
_OF_GROUPS = ("n_groups", "groups_time_state_size")
"""Attributes that it divides if there are several groups."""


@dataclass(frozen=True)
class DividedRows:
    """A rank's rows of a tensor.

    Attributes:
        dim: the divided dim.
        segments: (size, whether it is divided) of the parts of the dim, in order.
    """

    dim: int
    segments: tuple[tuple[int, bool], ...]

    def size(self, ranks: int) -> int:
        """Returns the number of a rank's rows."""
        return sum(size // ranks if divided else size for size, divided in self.segments)

    def of(self, tensor: Tensor, *, rank: int, ranks: int) -> Tensor:
        """Returns a rank's rows."""
        parts = tensor.split([size for size, _ in self.segments], self.dim)
        own = [
            part.chunk(ranks, self.dim)[rank] if divided else part
            for part, (_, divided) in zip(parts, self.segments, strict=True)
        ]
        return own[0] if len(own) == 1 else torch.cat(own, self.dim)


def divided_rows(block: nn.Module, ranks: int) -> dict[str, DividedRows | None] | None:
    """Returns a rank's rows of the parameters and buffers of a block by name; None for a tensor that is whole.

    Args:
        block: a recurrent block, on any device.
        ranks: number of ranks.

    Returns:
        None if no entry of the table fits the block, or the ranks do not divide its heads, groups or channels.
    """
    return next((found for entry in _TABLE if (found := _fitted(block, entry, ranks)) is not None), None)


def _fitted(block: Any, entry: Mapping[str, tuple[str, ...]], ranks: int) -> dict[str, DividedRows | None] | None:
    found: dict[str, DividedRows | None] = {}
    several = getattr(block, "n_groups", 1) > 1
    for name, tensor in _tensors(block):
        rows = entry.get(name) or entry.get(name.rpartition(".")[0])
        if rows is None or (tensor.ndim == 1 and rows == _OUTPUT):
            if rows is None:
                return None
            continue  # the bias of the output, which rank 0 adds
        if rows == _WHOLE:
            found[name] = None
            continue
        dim = 1 if rows == _OUTPUT else _long_dim(tensor)
        segments = _segments(block, rows, tensor.shape[dim], several=several)
        if sum(size for size, _ in segments) != tensor.shape[dim]:
            return None
        if any(size % ranks for size, divided in segments if divided):
            return None
        found[name] = DividedRows(dim, segments)
    counts = [value for _, _, value in _counts(block, several=several)]
    return found if all(value % ranks == 0 for value in counts) else None


def _long_dim(tensor: Tensor) -> int:
    """Returns the first dim with several rows."""
    return next((dim for dim, size in enumerate(tensor.shape) if size > 1), 0)


def _segments(block: Any, rows: tuple[str, ...], size: int, *, several: bool) -> tuple[tuple[int, bool], ...]:
    if rows in (_ALL, _OUTPUT):
        return ((size, True),)
    sizes = {
        "channels": size // len(rows),
        _GROUPS: getattr(block, "n_groups", 0) * getattr(block, "ssm_state_size", 0),
    }
    return tuple((sizes.get(row, getattr(block, row, 0)), several or row != _GROUPS) for row in rows)


def _tensors(block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from block.named_parameters()
    yield from block.named_buffers()


def _counts(block: nn.Module, *, several: bool) -> Iterator[tuple[nn.Module, str, int]]:
    names = (*_COUNTS, *(_OF_GROUPS if several else ()))
    for module in block.modules():
        yield from ((module, key, value) for key, value in vars(module).items() if key in names)


def own_heads(
    block: nn.Module, *, rank: int, ranks: int, groups: tuple[dist.ProcessGroup, ...]
) -> Callable[..., Any] | None:
    """Returns a function with a block's arguments that computes this rank's summand of its output.

    Args:
        block: a recurrent block with whole weights.
        rank: this rank.
        ranks: number of ranks.
        groups: groups whose ranks are all these ranks together, for a norm over all heads.

    Returns:
        None if the block cannot be divided.
    """
    rows = divided_rows(block, ranks)
    if rows is None:
        return None
    small: Any = copy.deepcopy(block).to("meta")
    several = getattr(block, "n_groups", 1) > 1
    for module, key, value in list(_counts(small, several=several)):
        setattr(module, key, value // ranks)
    for name, module in small.named_modules():
        own = rows.get(f"{name}.weight")
        if isinstance(module, nn.Conv1d) and own is not None:  # each channel by itself
            module.groups = module.in_channels = module.out_channels = own.size(ranks)
            small.conv_dim = module.groups
    norm: Any = getattr(small, "norm", None)
    if hasattr(norm, "group_size") and not several:
        norm.forward = partial(_norm_over_ranks, norm, groups, norm.group_size)
    return partial(_summand, block, small, rows, rank, ranks)


def _summand(
    block: nn.Module,
    small: nn.Module,
    rows: Mapping[str, DividedRows | None],
    rank: int,
    ranks: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    views: dict[str, Tensor] = {}
    for name, _ in _tensors(block):
        module, _, key = name.rpartition(".")
        # DeepSpeed's ZeRO-3 gathers a child's weights when they are accessed as an attribute
        whole, own = getattr(block.get_submodule(module), key), rows.get(name)
        if own is not None:
            views[name] = own.of(whole, rank=rank, ranks=ranks)
        else:
            views[name] = whole if name in rows else whole * float(rank == 0)
    small.train(block.training)
    return functional_call(small, views, args, kwargs)


def _norm_over_ranks(
    norm: Any, groups: tuple[dist.ProcessGroup, ...], size: int, hidden_states: Tensor, gate: Tensor | None = None
) -> Tensor:
    """Computes Mamba-2's gated norm of features [..., size / ranks] that are normalized together with other ranks'."""
    features = hidden_states.float()
    if gate is not None:
        features = features * F.silu(gate.float())
    squares: Tensor = _Sum.apply(features.pow(2).sum(-1, keepdim=True), groups)
    normed = features * torch.rsqrt(squares / size + norm.variance_epsilon)
    scaled: Tensor = norm.weight * normed.to(hidden_states.dtype)
    return scaled


class _Sum(torch.autograd.Function):
    """Sum over the ranks of groups; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        ctx.groups = groups
        return _summed(own, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.groups), None


def _summed(own: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
    total = own.contiguous().clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total
