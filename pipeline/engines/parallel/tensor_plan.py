"""Derives how tensor-parallel ranks compute the blocks of a decoder layer, where transformers has no usable plan.

A block is a child of a decoder layer: attention, an MLP, a recurrent mixer. A tiny model runs once, and the inputs and
output of each block are recorded. Then ways to shard the block's linear layers are tried: one rank after another
computes its summand, and the sum has to be the recorded output. The last linear layer is sharded along its inputs
(rowwise), the ones before it along their outputs (colwise), or computed whole, if a norm or a latent needs all of them.
Fused projections whose parts lie one after another (GPT-2's queries, keys and values; gate and up of an MLP) are
sliced: each rank keeps the weight whole and multiplies with its part. A block that mixes positions and cannot be
sharded runs X trial proves the result with every gradient.

Shapes: B = 1, T = 16 positions, D features.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foundation.errors import ConfigError
from pipeline.engines.parallel.stage_plan import largest_list
from pipeline.models.attention import ATTENTION_NAME, attention_windows, make_context
from pipeline.models.hf_config import config_from, config_key, one_line
from pipeline.models.layers import global_value
from pipeline.models.resize.shrink import shrink

_V, _T, _RANKS = 32, 16, 2
_TRIES = 192
"""Ways to shard a block that are tried at most; a block has some hundred at worst, and a try takes 1 ms."""
_HEADS = re.compile(r"(num|n)_.*heads?$|n_head$|num_heads$")
_WIDTHS = re.compile(r"embed_dim$|split_size$|hidden_size$|d_model$|inner_dim$|intermediate_size$|attn_hidden_size$")
_CONFIG, _CONFIG_HEADS = "config", ("num_attention_heads", "num_key_value_heads")
"""Attribute with the config from which Phi-3's attention reads its numbers of heads: a rank's block gets its own."""

WHOLE, COLWISE, ROWWISE, QKV, ONE_KEY, HALVES = "whole", "colwise", "rowwise", "qkv", "one key head", "halves"
"""Styles of linear layers. Of QKV, ONE_KEY and HALVES a rank keeps the whole weight and multiplies with its rows."""
SLICED = (QKV, ONE_KEY, HALVES)


class BlockKind(NamedTuple):
    """Name of a block below the model, with * for numbers, the name of its class, and the names of its parameters."""

    name: str
    module: str
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, name: str, module: nn.Module) -> BlockKind:
        """Returns the kind of a block."""
        parameters = tuple(key for key, _ in module.named_parameters())
        return cls(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), type(module).__name__, parameters)


@dataclass(frozen=True)
class BlockPlan:
    """How a rank computes a block.

    Attributes:
        styles: name of a linear layer within the block -> its style; empty for a block that runs whole.
        scaled: attributes of the block or its modules (module, attribute) that a rank divides by tp, e.g. numbers of
            heads.
    """

    styles: Mapping[str, str]
    scaled: tuple[tuple[str, str], ...] = ()


def derived_blocks(model: nn.Module, *, tp: int) -> dict[str, BlockPlan]:
    """Returns the plan of every block of a model by name; blocks that act on each position alone are left out.

    Args:
        model: the full model or a pipeline stage of it, on any device.
        tp: size of the tp axis. A block whose sizes it does not divide runs whole.

    Raises:
        ConfigError: the tiny model fails.
    """
    config: Any = model.config
    kinds = _kinds(config_key(config))
    found: dict[str, BlockPlan] = {}
    for name, module in model.named_modules():
        plan = kinds.get(BlockKind.of(name, module))
        if plan is not None:
            found[name] = plan if _divides(config, module, plan, tp) else BlockPlan({})
    return found


def _divides(config: Any, block: nn.Module, plan: BlockPlan, tp: int) -> bool:
    sizes = [getattr(block.get_submodule(name), key) for name, key in plan.scaled if key != _CONFIG]
    sizes += [global_value(config, "num_attention_heads") or 0]
    key_heads = global_value(config, "num_key_value_heads") or 0
    sizes += [] if key_heads == 1 else [key_heads]
    sizes += [linear_sizes(block.get_submodule(n), style)[0] for n, style in plan.styles.items() if style != WHOLE]
    return all(size % tp == 0 for size in sizes)


@cache
def _kinds(key: str) -> dict[BlockKind, BlockPlan]:
    """Derives the plans of an architecture's blocks from a tiny model; cached by config."""
    from pipeline.engines.parallel.architecture_trial import random_model  # noqa: PLC0415  # it imports this module

    config = shrink(config_from(key), divide=_RANKS, layers=2, vocab_size=_V)
    found: dict[BlockKind, BlockPlan] = {}
    try:
        for name, call in _recorded(random_model(config, attention=ATTENTION_NAME).eval()).items():
            kind = BlockKind.of(name, call.block)
            if kind not in found and (plan := _plan(call, _heads(config))) is not None:
                found[kind] = plan
    except Exception as error:  # each architecture fails in its own way
        why = f"transformers has no usable base_model_tp_plan for {config.model_type}, and none can be derived: "
        remedy = "use ZeRO or FSDP2 (parallel.tp 1)"
        raise ConfigError("parallel.tp", why=why + one_line(error), remedy=remedy) from None
    return found


def _heads(config: Any) -> int:
    return int(global_value(config, "num_attention_heads") or 0)


class _BlockCall(NamedTuple):
    """A recorded call of a block."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: Tensor
    output: Tensor

    def run(self, block: nn.Module, states: Tensor) -> Tensor:
        """Runs a block with the recorded arguments, but for the hidden states."""
        args = tuple(states if each is self.states else each for each in self.args)
        kwargs = {key: states if each is self.states else each for key, each in self.kwargs.items()}
        output: Tensor = _first(block(*args, **kwargs))
        return output


@torch.no_grad()
def _recorded(model: Any) -> dict[str, _BlockCall]:
    """Records the call of every block of a tiny model, in a forward pass with headrace's own attention."""
    calls: dict[str, _BlockCall] = {}

    def record(name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states = hidden_states(args, kwargs)
        if states is not None and isinstance(_first(output), Tensor) and _first(output).shape[:2] == states.shape[:2]:
            calls[name] = _BlockCall(block, args, kwargs, states, _first(output))

    layers = largest_list(model)
    hooks = [
        block.register_forward_hook(partial(record, f"{layers}.{number}.{child}"), with_kwargs=True)
        for number, layer in enumerate(model.get_submodule(layers) if layers else ())
        for child, block in _children(layer)
        if any(True for _ in block.children()) and any(True for _ in block.parameters())
    ]
    windows = attention_windows(model.config)
    context = make_context(windows, length=_T, dtype=torch.float32, device=torch.device("cpu"), documents=None)
    ids, positions = torch.arange(_T)[None] % _V, torch.arange(_T)[None]
    model(input_ids=ids, position_ids=positions, context=context, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def _children(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the children of a layer, and the items of its lists of modules (LongCat-Flash has two attentions)."""
    for name, child in layer.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{number}", item) for number, item in child.named_children())
        else:
            yield name, child


def hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns the first argument of a block that is hidden states [B, T, D]; others of this shape are, too."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor) and each.ndim == 3 and each.is_floating_point():
            return each
    return None


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, (tuple, list)) else output


@torch.no_grad()
def _plan(call: _BlockCall, heads: int) -> BlockPlan | None:
    """Returns the plan of a block; None if it acts on each position alone and cannot be sharded."""
    found = next(_ways(call, heads), None)
    return BlockPlan({}) if found is None and _mixes(call) else found


def _mixes(call: _BlockCall) -> bool:
    """Whether the output at a position depends on the hidden states at another."""
    other = call.states.clone()
    other[:, 0] += 1.0
    return not _close(call.run(call.block, other)[:, 1:], call.output[:, 1:])


def _ways(call: _BlockCall, heads: int) -> Iterator[BlockPlan]:
    """Yields the ways to shard a block whose ranks' outputs sum to the recorded output."""
    block = call.block
    if any(p.ndim > 2 for p in block.parameters()) or any(isinstance(m, nn.ModuleList) for m in block.modules()):
        return  # experts, convolutions
    linears = _called_linears(call)
    last = next((n for n, m in reversed(linears.items()) if linear_sizes(m, COLWISE)[0] == call.output.shape[-1]), None)
    if last is None or any(isinstance(m, nn.Linear) and n not in linears for n, m in block.named_modules()):
        return
    names = [name for name in linears if name != last]
    inside = linear_sizes(linears[last], ROWWISE)[0]
    fused = len(names) <= 2
    options = [_options(linear_sizes(linears[name], COLWISE)[0], inside, heads, fused=fused) for name in names]
    ways = itertools.product(itertools.product(*options), _scalings(block))
    for styles, scaled in itertools.islice(ways, _TRIES):
        if not names or set(styles) != {WHOLE}:
            plan = BlockPlan({**dict(zip(names, styles, strict=True)), last: ROWWISE}, scaled)
            if names and _sums_to_output(call, plan):
                yield plan


def _called_linears(call: _BlockCall) -> dict[str, nn.Module]:
    """Returns the linear layers of a block in the order of their calls."""
    names = {module: name for name, module in call.block.named_modules()}
    found: dict[str, nn.Module] = {}

    def called(module: nn.Module, *_: Any) -> None:
        found[names[module]] = module

    plain = (m for m in names if isinstance(m, Conv1D) or (isinstance(m, nn.Linear) and _is_plain(m)))
    hooks = [module.register_forward_hook(called) for module in plain]
    call.run(call.block, call.states)
    for hook in hooks:
        hook.remove()
    return found


def _is_plain(linear: nn.Linear) -> bool:
    return type(linear).forward is nn.Linear.forward


def _options(width: int, inside: int, heads: int, *, fused: bool) -> list[str]:
    """Returns the styles to try for a linear layer of some output width before one of some input width."""
    sliced: list[str] = []
    if not fused:
        return [COLWISE, WHOLE]
    if width == 2 * inside:
        sliced.append(HALVES)
    if width > inside and (width - inside) % 2 == 0:
        sliced.append(QKV)
        sliced += [ONE_KEY] if heads and width - inside == 2 * (inside // heads) else []
    return [COLWISE, *sliced, WHOLE]


def _scalings(block: nn.Module) -> list[tuple[tuple[str, str], ...]]:
    """Returns sets of attributes to divide: none, numbers of heads, and also widths."""
    found = [
        (name, key, bool(_HEADS.search(key)))
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool) and (_HEADS.search(key) or _WIDTHS.search(key))
        if not isinstance(module, (nn.Linear, Conv1D))
    ]
    heads = tuple((name, key) for name, key, of_heads in found if of_heads)
    config = (("", _CONFIG),) if getattr(block, _CONFIG, None) is not None else ()
    every = tuple((name, key) for name, key, _ in found)
    widths = tuple(each for each in every if each not in heads)
    return list(dict.fromkeys([(), heads, every, widths, heads + config, every + config]))


def _sums_to_output(call: _BlockCall, plan: BlockPlan) -> bool:
    """Whether the summands that the ranks compute from the block's input add up to its output."""
    total = torch.zeros_like(call.output)
    try:
        for rank in range(_RANKS):
            local = copy.deepcopy(call.block)
            _shard_copy(local, plan, rank)
            total += call.run(local, call.states)
    except Exception:  # shapes do not fit
        return False
    return _close(total, call.output)


def _shard_copy(block: nn.Module, plan: BlockPlan, rank: int) -> None:
    """Reduces a tiny block to a rank's shards, in place; rank 0 adds the bias of the last linear layer."""
    inside = next(linear_sizes(block.get_submodule(n), s)[0] for n, s in plan.styles.items() if s == ROWWISE)
    for name, style in plan.styles.items():
        linear: Any = block.get_submodule(name)
        if style == WHOLE:
            continue
        size, dim = linear_sizes(linear, style)
        rows = rank_rows(style, size, inside, rank=rank, ranks=_RANKS)
        linear.weight = nn.Parameter(_rows(linear.weight, dim, rows))
        if linear.bias is not None:
            bias = _rows(linear.bias, 0, rows) if style != ROWWISE else linear.bias * (rank == 0)
            linear.bias = nn.Parameter(bias)
        if isinstance(linear, Conv1D) and style != ROWWISE:
            linear.nf = linear.weight.shape[dim]
    scale_attributes(block, plan, _RANKS)


def scale_attributes(block: nn.Module, plan: BlockPlan, ranks: int) -> None:
    """Divides the attributes of a block that count heads or features, in place."""
    for name, key in plan.scaled:
        module = block.get_submodule(name)
        value = getattr(module, key)
        if key != _CONFIG:
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


def _rows(tensor: Tensor, dim: int, ranges: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([tensor.narrow(dim, first, end - first) for first, end in ranges], dim)


class SlicedLinear(nn.Linear):
    """A linear layer with a whole weight, of whose outputs a rank computes some: `rows`."""

    rows: tuple[tuple[int, int], ...]

    def forward(self, features: Tensor) -> Tensor:
        """Computes a rank's outputs."""
        bias = None if self.bias is None else _rows(self.bias, 0, self.rows)
        return nn.functional.linear(features, _rows(self.weight, 0, self.rows), bias)


class SlicedConv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, sliced as in `SlicedLinear`."""

    rows: tuple[tuple[int, int], ...]

    def forward(self, features: Tensor) -> Tensor:
        """Computes a rank's outputs."""
        outputs: Tensor = features @ _rows(self.weight, 1, self.rows) + _rows(self.bias, 0, self.rows)
        return outputs


def slice_linear(linear: nn.Module, style: str, inside: int, *, rank: int, ranks: int) -> None:
    """Makes a linear layer compute a rank's rows, in place; see `rank_rows` for the arguments."""
    rows = rank_rows(style, linear_sizes(linear, style)[0], inside, rank=rank, ranks=ranks)
    linear.__class__ = SlicedConv1D if isinstance(linear, Conv1D) else SlicedLinear
    linear.rows = rows  # type: ignore[assignment]


def _close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())
