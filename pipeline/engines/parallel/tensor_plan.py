"""Derives how tensor-parallel ranks compute the blocks of a decoder layer, where transformers has no usable plan.

A block is a child of a decoder layer: attention, an MLP, a recurrent mixer; or a part of one: the shared expert of a
mixture, DBRX's attention. A tiny model runs once, and the inputs and output of each block are recorded. Then ways
to shard the block's linear layers are tried: one rank after another computes its summand, and the sum has to be the
recorded output. The last linear layer is sharded along its inputs (rowwise), the ones before it along their outputs
(colwise), or computed whole: those of a latent, and of a module that selects keys (DeepSeek-V3.2's indexer). Fused
projections whose parts lie one after another (GPT-2's queries, keys and values; gate and up of an MLP) are sliced: each
rank keeps the weight whole and multiplies with its part. A norm over all heads gathers the features of all ranks, and
of a parameter with a row per head (sinks) a rank has the rows of its heads. A block that mixes positions and cannot be
sharded runs whole on every rank, on the gathered sequence. The sharded trial proves the result with every gradient.

Shapes: B = 1, T = 16 positions, D features.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Set
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foundation.errors import ConfigError
from pipeline.engines.parallel.stage_plan import config_from, config_key, largest_list
from pipeline.engines.parallel.tensor_styles import (
    COLWISE,
    CONFIG,
    GATHERED,
    HALVES,
    HEADS,
    NO_TABLE,
    ONE_KEY,
    QKV,
    ROWWISE,
    SLICED,
    WHOLE,
    BlockPlan,
    linear_sizes,
    rank_rows,
    rows_of,
    scale_attributes,
    sharded_size,
)
from pipeline.engines.parallel.trial_cache import remembered
from pipeline.models.attention import ATTENTION_NAME, attention_windows, make_context
from pipeline.models.hf_config import one_line
from pipeline.models.layers import global_value
from pipeline.models.resize.shrink import shrink

_V, _T, _RANKS = 32, 16, 2
_TRIES = 192
"""Ways to shard a block that are tried at most; a block has some hundred at worst, and a try takes 1 ms."""
_HEADS = re.compile(r"(num|n)_.*heads?$|n_head$|num_heads$")
_WIDTHS = re.compile(r"embed_dim$|split_size$|hidden_size$|d_model$|inner_dim$|intermediate_size$|attn_hidden_size$")


_Norms = dict[str, tuple[str, Tensor]]
"""Name of a norm over all heads -> the linear layer whose outputs it normalizes, and its recorded output."""


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


def derived_blocks(model: nn.Module, *, tp: int, table: Mapping[str, str] = NO_TABLE) -> dict[str, BlockPlan]:
    """Returns the plan of every block of a model by name; blocks that act on each position alone are left out.

    Args:
        model: the full model or a pipeline stage of it, on any device.
        tp: size of the tp axis. A block whose sizes it does not divide runs whole.
        table: the config's `parallel.tp_plan`, which overrides what is derived.

    Raises:
        ConfigError: the tiny model fails, or the table is wrong.
    """
    config: Any = model.config
    kinds = _kinds(config_key(config), tuple(sorted(table.items())))
    found: dict[str, BlockPlan] = {}
    for name, module in model.named_modules():
        plan = kinds.get(BlockKind.of(name, module))
        if plan is not None:
            found[name] = plan if _divides(config, module, plan, tp) else BlockPlan({})
    return found


def _divides(config: Any, block: nn.Module, plan: BlockPlan, tp: int) -> bool:
    sizes = [getattr(block.get_submodule(name), key) for name, key in plan.scaled if key != CONFIG]
    sizes += [global_value(config, "num_attention_heads") or 0]
    key_heads = global_value(config, "num_key_value_heads") or 0
    sizes += [] if key_heads == 1 else [key_heads]
    sizes += [sharded_size(block, name, style) for name, style in plan.styles.items() if style != WHOLE]
    return all(size % tp == 0 for size in sizes)


@cache
def _kinds(key: str, table: tuple[tuple[str, str], ...]) -> dict[BlockKind, BlockPlan]:
    """Returns the plans of an architecture's blocks; cached by config and table, in memory and on disk."""

    def derive() -> list[Any]:
        found = _derived_kinds(key, dict(table))
        return [[*kind, dict(plan.styles), plan.scaled, plan.own_residual] for kind, plan in found.items()]

    rows = remembered("shards", [key, json.dumps(table)], derive)
    return {
        BlockKind(name, module, tuple(parameters)): BlockPlan(styles, tuple(tuple(each) for each in scaled), residual)
        for name, module, parameters, styles, scaled, residual in rows
    }


def _derived_kinds(key: str, table: Mapping[str, str]) -> dict[BlockKind, BlockPlan]:
    """Derives the plans of an architecture's blocks from a tiny model."""
    from pipeline.engines.parallel.architecture_trial import random_model  # noqa: PLC0415  # it imports this module
    from pipeline.engines.parallel.tensor_table import table_plans  # noqa: PLC0415  # it imports this module

    config = shrink(config_from(key), divide=_RANKS, layers=2, vocab_size=_V)
    found: dict[BlockKind, BlockPlan] = {}
    try:
        calls, seen = recorded_calls(random_model(config, attention=ATTENTION_NAME).eval()), set[BlockKind]()
        for name, call in calls.items():
            kind = BlockKind.of(name, call.block)
            if kind not in seen and not any(name.startswith(f"{block}.") for block in calls):
                found |= _plans(name, calls, _heads(config))
                seen.add(kind)
        found |= table_plans(table, calls, found)
    except ConfigError:
        raise
    except Exception as error:  # each architecture fails in its own way
        why = f"transformers has no usable base_model_tp_plan for {config.model_type}, and none can be derived: "
        remedy = "use ZeRO or FSDP2 (parallel.tp 1)"
        raise ConfigError("parallel.tp", why=why + one_line(error), remedy=remedy) from None
    return found


def _heads(config: Any) -> tuple[int, int]:
    """Returns the numbers of heads and key/value heads; 0 without attention."""
    heads = int(global_value(config, "num_attention_heads") or 0)
    return heads, int(global_value(config, "num_key_value_heads") or heads)


class BlockCall(NamedTuple):
    """A recorded call of a block."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: Tensor
    output: Tensor

    def run(self, block: nn.Module, states: Tensor, *, residual: bool = True) -> Tensor:
        """Runs a block with the recorded arguments, but for the hidden states; without a residual, zeros are added."""

        def argument(each: Any) -> Any:
            if each is self.states:
                return states
            return each if residual or not self._is_residual(each) else torch.zeros_like(each)

        kwargs = {key: argument(each) for key, each in self.kwargs.items()}
        output: Tensor = _first(block(*(argument(each) for each in self.args), **kwargs))
        return output

    @property
    def has_residual(self) -> bool:
        """Whether the block gets further hidden states."""
        return any(self._is_residual(each) for each in (*self.args, *self.kwargs.values()))

    def _is_residual(self, each: Any) -> bool:
        return isinstance(each, Tensor) and each.shape == self.states.shape and each is not self.states


@torch.no_grad()
def recorded_calls(model: Any, *, documents: Tensor | None = None) -> dict[str, BlockCall]:
    """Records the call of every block of a tiny model, in a forward pass with headrace's own attention.

    Args:
        model: the tiny model.
        documents: int32 [1, T], the document mask; None for one document.
    """
    calls: dict[str, BlockCall] = {}

    def record(name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states, output = hidden_states(args, kwargs), _first(output)
        if states is None or not isinstance(output, Tensor) or output.shape[:-1] != states.shape[:-1]:
            return
        if states.shape[:-1].numel() == _T:  # not some tokens of an expert
            calls[name] = BlockCall(block, args, kwargs, states, output.clone())  # Llama 4 adds to it in place

    layers = largest_list(model)
    hooks = [
        block.register_forward_hook(partial(record, f"{layers}.{number}.{name}"), with_kwargs=True)
        for number, layer in enumerate(model.get_submodule(layers) if layers else ())
        for child, outer in _children(layer)
        for name, block in ((child, outer), *((f"{child}.{part}", inner) for part, inner in outer.named_children()))
        if any(True for _ in block.children()) and any(True for _ in block.parameters())
    ]
    windows = attention_windows(model.config)
    context = make_context(windows, length=_T, dtype=torch.float32, device=torch.device("cpu"), documents=documents)
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
    """Returns the first argument of a block that is hidden states [B, T, D], else tokens [N, D]; None without either.

    Further arguments of its shape are hidden states, too.
    """
    floats = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point()]
    return next((each for dims in (3, 2) for each in floats if each.ndim == dims), None)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, (tuple, list)) else output


@torch.no_grad()
def _plans(name: str, calls: Mapping[str, BlockCall], heads: tuple[int, int]) -> dict[BlockKind, BlockPlan]:
    """Returns the plan of a block or of its parts; none if it acts on each position alone and cannot be sharded.

    Args:
        name: name of the block.
        calls: recorded calls of blocks and parts.
        heads: numbers of heads and key/value heads.
    """
    call = calls[name]
    kind, plan = BlockKind.of(name, call.block), next(_ways(call, heads), None)
    if plan is not None:
        return {kind: plan}
    inside = [each for each in calls if each.startswith(f"{name}.")]
    parts = {each: plan for each in inside if (plan := next(_ways(calls[each], heads), None)) is not None}
    if not _mixes(call):  # parts of a norm are too small to be worth an exchange
        return {BlockKind.of(each, calls[each].block): parts[each] for each in parts if _has_experts(call.block)}
    hooks = [calls[each].block.register_forward_hook(zero_output) for each in parts]
    elsewhere = _mixes(call)
    for hook in hooks:
        hook.remove()
    return {kind: BlockPlan({})} if elsewhere else {BlockKind.of(n, calls[n].block): parts[n] for n in parts}


def _has_experts(block: nn.Module) -> bool:
    """Whether a block has stacked experts, or a list of them; or convolutions."""
    stacked = any(p.ndim > 2 for p in block.parameters())
    return stacked or any(isinstance(m, nn.ModuleList) for m in block.modules())


def zero_output(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Forward hook: replaces a block's output, or the first of several outputs, by zeros."""
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)


def _mixes(call: BlockCall) -> bool:
    """Whether the output at a position depends on the hidden states at another."""
    other = call.states.clone()
    other.view(_T, -1)[0] = other.view(_T, -1)[0].roll(1)  # a constant would vanish in a LayerNorm (DBRX)
    one, two = (call.run(call.block, each).view(_T, -1)[1:] for each in (call.states, other))
    return not close(two, one)


def _ways(call: BlockCall, heads: tuple[int, int]) -> Iterator[BlockPlan]:
    """Yields the ways to shard a block whose ranks' outputs sum to the recorded output."""
    block = call.block
    if _has_experts(block):
        return
    linears, norms = called_modules(call)
    last = next((n for n, m in reversed(linears.items()) if linear_sizes(m, COLWISE)[0] == call.output.shape[-1]), None)
    if last is None or any(isinstance(m, nn.Linear) and n not in linears for n, m in block.named_modules()):
        return
    names = [name for name in linears if name != last]
    apart = [name for name in names if name.rpartition(".")[0] != last.rpartition(".")[0]]
    for whole in [apart, []] if 0 < len(apart) < len(names) else [[]]:
        free = {name: linears[name] for name in names if name not in whole}
        ways = itertools.product(
            _styles(free, linear_sizes(linears[last], ROWWISE)[0], heads[0]),
            scalings(block, {name.rpartition(".")[0] for name in whole}),
            _rows_per_head(block, heads),
        )
        for styles, scaled, rows in itertools.islice(ways, _TRIES):
            if set(styles.values()) <= {WHOLE}:
                continue
            gathered = {norm: GATHERED for norm, (linear, _) in norms.items() if styles.get(linear) == COLWISE}
            every = dict.fromkeys(whole, WHOLE) | styles | {last: ROWWISE} | gathered | dict.fromkeys(rows, HEADS)
            for own_residual in (False, True) if call.has_residual else (False,):
                if sums_to_output(call, plan := BlockPlan(every, scaled, own_residual), norms):
                    yield plan


@torch.no_grad()
def called_modules(call: BlockCall) -> tuple[dict[str, nn.Module], _Norms]:
    """Returns the linear layers of a block in the order of their calls, and the norms over all outputs of one."""
    names = {module: name for name, module in call.block.named_modules()}
    linears: dict[str, nn.Module] = {}
    made: dict[tuple[int, torch.Size], str] = {}
    norms: _Norms = {}

    def called(module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        if isinstance(module, nn.Linear) and not _is_plain(module, args, output):
            return
        if isinstance(module, (Conv1D, nn.Linear)):
            linears[names[module]] = module
            made[output.data_ptr(), output.shape] = names[module]
            kept.append(output)
        elif args and (source := made.get((args[0].data_ptr(), args[0].shape))) is not None:
            norms[names[module]] = source, output

    kept: list[Tensor] = []  # so that no later tensor gets the address
    wanted = (module for module in names if isinstance(module, (Conv1D, nn.Linear)) or _is_norm(module))
    hooks = [module.register_forward_hook(called) for module in wanted]
    call.run(call.block, call.states)
    for hook in hooks:
        hook.remove()
    return linears, norms


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 1 and not any(True for _ in module.children())


def _is_plain(linear: nn.Linear, args: tuple[Any, ...], output: Tensor) -> bool:
    """Whether a layer computes what `nn.Linear` does, perhaps in its own code (Falcon)."""
    own = type(linear).forward is not nn.Linear.forward
    return not own or close(nn.functional.linear(args[0], linear.weight, linear.bias), output)


def _styles(linears: Mapping[str, nn.Module], inside: int, heads: int) -> Iterator[dict[str, str]]:
    """Yields the styles to try for the linear layers before a rowwise one with `inside` inputs."""
    fused = len(linears) <= 2
    options = [_options(linear_sizes(each, COLWISE)[0], inside, heads, fused=fused) for each in linears.values()]
    for styles in itertools.product(*options):
        yield dict(zip(linears, styles, strict=True))


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


def _rows_per_head(block: nn.Module, heads: tuple[int, int]) -> list[tuple[str, ...]]:
    """Returns sets of parameters of which a rank may have the rows of its heads: none, the block's own, and all."""
    found = [
        name for name, p in block.named_parameters() if p.ndim and p.shape[0] in heads and not _in_linear(block, name)
    ]
    return list(dict.fromkeys([(), tuple(name for name in found if "." not in name), tuple(found)]))


def _in_linear(block: nn.Module, parameter: str) -> bool:
    return isinstance(block.get_submodule(parameter.rpartition(".")[0]), (nn.Linear, Conv1D))


def scalings(block: nn.Module, whole: Set[str]) -> list[tuple[tuple[str, str], ...]]:
    """Returns sets of attributes to divide, but for modules that run whole: none, numbers of heads, and also widths."""
    found = [
        (name, key, bool(_HEADS.search(key)))
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int) and value > 1 and (_HEADS.search(key) or _WIDTHS.search(key))
        if not isinstance(module, (nn.Linear, Conv1D)) and name not in whole
    ]
    heads = tuple((name, key) for name, key, of_heads in found if of_heads)
    config = (("", CONFIG),) if getattr(block, CONFIG, None) is not None else ()
    every = tuple((name, key) for name, key, _ in found)
    widths = tuple(each for each in every if each not in heads)
    return list(dict.fromkeys([(), heads, every, widths, heads + config, every + config]))


@torch.no_grad()
def sums_to_output(call: BlockCall, plan: BlockPlan, norms: _Norms) -> bool:
    """Whether the summands that the ranks compute from the block's input add up to its output."""
    total = torch.zeros_like(call.output)
    try:
        for rank in range(_RANKS):
            local = copy.deepcopy(call.block)
            _shard_copy(local, plan, norms, rank)
            total += call.run(local, call.states, residual=rank == 0 or not plan.own_residual)
    except Exception:  # shapes do not fit
        return False
    return close(total, call.output)


def _shard_copy(block: nn.Module, plan: BlockPlan, norms: _Norms, rank: int) -> None:
    """Reduces a tiny block to a rank's shards, in place; rank 0 adds the bias of the last linear layer."""
    inside = next(linear_sizes(block.get_submodule(n), ROWWISE)[0] for n in plan.having(ROWWISE))
    for name in plan.having(HEADS):
        owner: Any = block.get_submodule(name.rpartition(".")[0])
        key = name.rpartition(".")[2]
        setattr(owner, key, nn.Parameter(getattr(owner, key).chunk(_RANKS)[rank]))
    for name in plan.having(GATHERED):  # of the features of all ranks
        norm: Any = block.get_submodule(name)
        norm.forward = partial(_recorded_part, norms[name][1].chunk(_RANKS, -1)[rank])
    for name in plan.having(COLWISE, ROWWISE, *SLICED):
        linear: Any = block.get_submodule(name)
        style = plan.styles[name]
        size, dim = linear_sizes(linear, style)
        rows = rank_rows(style, size, inside, rank=rank, ranks=_RANKS)
        linear.weight = nn.Parameter(rows_of(linear.weight, dim, rows))
        if linear.bias is not None:
            bias = rows_of(linear.bias, 0, rows) if style != ROWWISE else linear.bias * (rank == 0)
            linear.bias = nn.Parameter(bias)
        if isinstance(linear, Conv1D) and style != ROWWISE:
            linear.nf = linear.weight.shape[dim]
    scale_attributes(block, plan, rank=rank, ranks=_RANKS)


def _recorded_part(part: Tensor, _features: Tensor) -> Tensor:
    return part


def close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())
