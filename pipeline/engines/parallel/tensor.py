"""Tensor parallelism with sequence parallelism, applied from outside to a Hugging Face decoder on meta.

The model's own `tp_plan` defines which linear layers are sharded along their outputs (colwise) and which along their
inputs (rowwise). Embedding and head are sharded along the vocabulary. Between the sharded blocks every rank has T / tp
positions of the sequence. A block's input is all-gathered (backward: reduce-scattered), its output reduce-scattered.
Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.

On every rank, unsharded parameters (norms, biases of rowwise layers) get only a part of the positions or heads. Their
gradients must therefore be summed over the tp group; `TensorParallel.partial_gradients` names these parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foundation.errors import ConfigError
from pipeline.config.topology import largest_divisor
from pipeline.engines.parallel.collectives import all_gather, reduce_scatter
from pipeline.engines.parallel.recurrent import recurrent_blocks
from pipeline.engines.parallel.stage_plan import largest_list
from pipeline.engines.parallel.tensor_plan import derived_blocks, hidden_states, zero_output
from pipeline.engines.parallel.tensor_styles import (
    COLWISE,
    GATHERED,
    HEADS,
    NO_TABLE,
    ONE_KEY,
    ROWWISE,
    SLICED,
    BlockPlan,
    linear_sizes,
    own_features,
    scale_attributes,
    slice_linear,
    whole_features,
)
from pipeline.engines.parallel.trial_cache import remembered
from pipeline.engines.parallel.vocabulary import VocabularyShard
from pipeline.models.construction.rectangle import Rectangle
from pipeline.models.decoder_layers import base_of
from pipeline.models.hf_config import config_from, config_key
from pipeline.models.layers import global_value
from pipeline.models.multi_token import original_module
from pipeline.models.resize.shrink import shrink

_SEQUENCE = -2
"""Dim of hidden states [B, T, D] that is sharded between blocks; of tokens [N, D], which a shared expert takes in any
order, dim 0."""

_EXPERTS = "moe_tp_experts"
"""Transformers' name for the style of a mixture of experts. Experts stay whole: every tp rank routes its positions."""

_V = 32
"""Ids of a tiny model."""

_REPLICATED = {"replicated_with_grad_allreduce", _EXPERTS}


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel shards of this rank.

    Attributes:
        group: the tp ranks.
        boxes: name of every sharded parameter -> this rank's shard.
        partial_gradients: names of unsharded parameters, whose gradients must be summed over the group.
        vocabulary: this rank's shard of the vocabulary.
        derived: whether the plan is not transformers' own (`tensor_plan`); the base model then gets embeddings, not
            ids, since GPT-2 gives its output the shape of its ids, and here it has T / tp positions.
    """

    group: dist.ProcessGroup
    boxes: dict[str, Rectangle]
    partial_gradients: frozenset[str]
    vocabulary: VocabularyShard
    derived: bool = False


def check_tp_plan(model: nn.Module, *, tp: int, table: Mapping[str, str] = NO_TABLE) -> dict[str, str]:
    """Returns the style of every linear layer, norm and parameter that tensor parallelism changes, by name.

    Args:
        model: a Hugging Face causal language model, on any device.
        tp: size of the tp axis.
        table: the config's `parallel.tp_plan`.

    Raises:
        ConfigError: the architecture's plan cannot be derived, or tp does not divide a size.
    """
    _refuse_shared_bias(model, tp)
    if uses_given_plan(model.config) and not table:
        return _given_styles(model, tp=tp)
    _check_divides(model.config.vocab_size, tp, "model.config.vocab_size")  # type: ignore[union-attr, arg-type]
    blocks = derived_blocks(model, tp=tp, table=table)
    return {f"{block}.{name}": style for block, plan in blocks.items() for name, style in plan.styles.items()}


def _refuse_shared_bias(model: Any, tp: int) -> None:
    """Refuses a head whose bias, sharded with the vocabulary, is also another module's (BERT's heads)."""
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None and sum(bias is each for m in model.modules() for each in m._parameters.values()) > 1:
        why = f"the bias of {model.config.model_type}'s head belongs to two modules, and is sharded in one"
        raise ConfigError("parallel.tp", tp, why=why, remedy="use ZeRO or FSDP2 (parallel.tp 1)")


def undivided_blocks(model: nn.Module, *, tp: int, table: Mapping[str, str] = NO_TABLE) -> dict[str, str]:
    """Returns the blocks whose heads tensor-parallel ranks do not divide, by name, with the reason in words.

    The arguments are those of `check_tp_plan`.
    """
    if uses_given_plan(model.config) and not table:
        return {}
    found: dict[str, str] = {}
    for name, plan in derived_blocks(model, tp=tp, table=table).items():
        if not plan.styles:
            found[name] = "runs whole on every tensor-parallel rank"
        elif plan.having(ONE_KEY):
            found[name] = "has one key/value head, which every tensor-parallel rank computes"
    return found


def uses_given_plan(config: Any) -> bool:
    """Whether transformers' own plan is supported, and covers all modules that mix positions."""
    return _given_plan_works(config_key(config))


@cache
def _given_plan_works(key: str) -> bool:
    return bool(remembered("given", [key], lambda: _try_given_plan(key)))


def _try_given_plan(key: str) -> bool:
    """Tries the given plan on a tiny model."""
    from pipeline.engines.parallel.architecture_trial import random_model  # noqa: PLC0415  # it imports this module

    config = config_from(key)
    if not getattr(config, "base_model_tp_plan", None) or global_value(config, "num_key_value_heads") == 1:
        return False
    try:
        tiny = random_model(shrink(config, divide=2, layers=2, vocab_size=_V)).eval()
        blocks = {name.rpartition(".")[0] for name in _given_styles(tiny, tp=1)}
    except ConfigError:
        return False
    for name in blocks:
        tiny.get_submodule(name).register_forward_hook(zero_output)
    ids = torch.arange(16)[None] % _V
    with torch.no_grad():
        one, other = (tiny(input_ids=each, use_cache=False).logits[:, 1:] for each in (ids, ids.clamp(min=1)))
    return torch.equal(one, other)


def _given_styles(model: nn.Module, *, tp: int) -> dict[str, str]:
    """Returns the styles of transformers' own plan; see `check_tp_plan`.

    Raises:
        ConfigError: the architecture has no plan or an unsupported plan, or tp does not divide a size.
    """
    config: Any = model.config
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ConfigError(
            "parallel.tp",
            tp,
            why=f"transformers has no base_model_tp_plan for {config.model_type}, which shards its layers",
            remedy="use ZeRO or FSDP2 (parallel.tp 1), or another architecture, e.g. llama",
        )
    prefix = f"{model.base_model_prefix}."
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        planned = original_module(model, name)
        if not planned.startswith(prefix):
            continue
        style = _style(plan, planned.removeprefix(prefix))
        if style is None or style in _REPLICATED:
            continue
        if style not in ("colwise", "rowwise") or not isinstance(module, nn.Linear):
            raise ConfigError(
                "parallel.tp",
                tp,
                why=f"the plan of {config.model_type} shards {name} as '{style}', which is not supported",
                remedy="use ZeRO or FSDP2 for this architecture (parallel.tp 1)",
            )
        _check_divides(module.weight.shape[0 if style == "colwise" else 1], tp, name)
        styles[name] = style
    _check_blocks_covered(model, plan, styles, tp)
    _refuse_shared_experts(model, plan, tp)
    _check_divides(config.vocab_size, tp, "model.config.vocab_size")
    for key in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config, key, None):
            _check_divides(getattr(config, key), tp, f"model.config.{key}")
    return styles


def _check_blocks_covered(model: nn.Module, plan: dict[str, str], styles: dict[str, str], tp: int) -> None:
    """Refuses a plan that omits a parameter of a sharded block: it may be per head, and heads are sharded."""
    for block in sorted({name.rpartition(".")[0] for name in styles}):
        for name, _ in model.get_submodule(block).named_parameters(prefix=block):
            module = name.rpartition(".")[0]
            planned = original_module(model, module).removeprefix(f"{model.base_model_prefix}.")
            if module not in styles and _style(plan, planned) is None:
                raise ConfigError(
                    "parallel.tp",
                    tp,
                    why=f"the plan of {model.config.model_type} does not cover {name}",  # type: ignore[union-attr]
                    remedy="use ZeRO or FSDP2 for this architecture (parallel.tp 1)",
                )


def _refuse_shared_experts(model: nn.Module, plan: dict[str, str], tp: int) -> None:
    """Refuses a plan for a model with shared experts, whose input may be tokens [N, D]: a derived plan shards them."""
    prefix = f"{model.base_model_prefix}."
    for experts, _ in model.named_modules():
        if _style(plan, original_module(model, experts).removeprefix(prefix)) != _EXPERTS:
            continue
        mixture = experts.rpartition(".")[0]
        for name, module in model.get_submodule(mixture).named_modules(prefix=mixture):
            inner = name.removeprefix(f"{mixture}.")
            if isinstance(module, nn.Linear) and "." in inner and not name.startswith(f"{experts}."):  # not a gate
                why = f"{name} is shared by all tokens of a mixture of experts, and its plan does not cover it"
                remedy = "use ZeRO or FSDP2 for this architecture (parallel.tp 1)"
                raise ConfigError("parallel.tp", tp, why=why, remedy=remedy)


def apply_tensor_parallel(
    model: nn.Module, group: dist.ProcessGroup, *, names: dict[int, str], table: Mapping[str, str] = NO_TABLE
) -> TensorParallel:
    """Shards a model on meta in place; its modules then compute with this rank's shards.

    Args:
        model: a full Hugging Face causal language model, or a pipeline stage of it.
        group: the tp ranks, two or more.
        names: id of a parameter -> its name in the full model (a tied parameter's name may differ in a stage).
        table: the config's `parallel.tp_plan`.

    Raises:
        ConfigError: the architecture has no plan or an unsupported plan, or tp does not divide a size.
    """
    tp, rank = group.size(), group.rank()
    styles = check_tp_plan(model, tp=tp, table=table)
    given = uses_given_plan(model.config) and not table
    blocks = None if given else derived_blocks(model, tp=tp, table=table)
    shards: dict[int, nn.Parameter] = {}
    boxes: dict[str, Rectangle] = {}

    def shard(module: nn.Module, key: str, dim: int) -> None:
        full = module._parameters[key]
        if full is None:
            return
        if id(full) not in shards:  # a tied weight is sharded once
            sizes, offsets = list(full.shape), [0] * full.ndim
            sizes[dim] //= tp
            offsets[dim] = rank * sizes[dim]
            boxes[names[id(full)]] = Rectangle(tuple(offsets), tuple(sizes))
            shards[id(full)] = nn.Parameter(full.new_empty(sizes), requires_grad=full.requires_grad)
        module._parameters[key] = shards[id(full)]

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if isinstance(embedding, nn.Embedding):  # a pipeline stage may have none
        shard(embedding, "weight", 0)
        _shard_embedding(embedding, group)
    if isinstance(head, nn.Linear):
        shard(head, "weight", 0)
        shard(head, "bias", 0)
    _shard_linears(model, styles, group, shard)
    if blocks is not None:
        _apply_derived(model, group, blocks)
    else:
        gather = partial(_gather_input, group)  # one for all blocks: a compiled layer depends on its identity
        for name in {name.rpartition(".")[0] for name, style in styles.items() if style == COLWISE}:
            model.get_submodule(name).register_forward_pre_hook(gather, with_kwargs=True)
    _scatter_inputs_of_layers(base_of(model), group)
    # not from the head's weight, which a sharding engine may already have emptied
    config: Any = model.config
    vocabulary = VocabularyShard(group, rank * (config.vocab_size // tp))
    return TensorParallel(group, boxes, frozenset(names.values()) - boxes.keys(), vocabulary, blocks is not None)


def _scatter_inputs_of_layers(base: Any, group: dist.ProcessGroup) -> None:
    """Keeps this rank's positions of what the layers get besides hidden states, from ids [B, T] (Gemma 3n, Gemma 4)."""
    if (whole := getattr(base, "get_per_layer_inputs", None)) is not None:
        base.get_per_layer_inputs = lambda *args: whole(*args).chunk(group.size(), dim=1)[group.rank()]


def _shard_linears(
    model: nn.Module,
    styles: dict[str, str],
    group: dist.ProcessGroup,
    shard: Callable[[nn.Module, str, int], None],
) -> None:
    """Shards linear layers and parameters in place, by a function of module, parameter and dim."""
    for name, style in styles.items():
        if style == HEADS:
            owner, _, key = name.rpartition(".")
            shard(model.get_submodule(owner), key, 0)
        if style not in (COLWISE, ROWWISE):
            continue
        linear: Any = model.get_submodule(name)
        shard(linear, "weight", linear_sizes(linear, style)[1])
        if style == ROWWISE:
            linear.__class__ = RowwiseConv1D if isinstance(linear, Conv1D) else RowwiseLinear
            linear.group = group
            continue
        shard(linear, "bias", 0)
        if isinstance(linear, Conv1D):
            linear.nf //= group.size()


def _apply_derived(model: nn.Module, group: dist.ProcessGroup, blocks: Mapping[str, BlockPlan]) -> None:
    """Adds to a model with sharded linear layers what its derived plan needs besides, in place."""
    # one of each for all blocks: a compiled layer depends on their identity
    gathers = {own: partial(_gather_inputs, group, own) for own in (False, True)}
    scatter = partial(_own_positions, group)
    recurrent = frozenset(recurrent_blocks(model))  # `apply_recurrent` gathers and scatters theirs
    whole, own = partial(whole_features, group), partial(own_features, group)
    for name, plan in blocks.items():
        if name in recurrent:
            continue
        block = model.get_submodule(name)
        block.register_forward_pre_hook(gathers[plan.own_residual], with_kwargs=True)
        if not plan.styles:
            block.register_forward_hook(scatter)
        for child in plan.having(*SLICED):
            width = linear_sizes(block.get_submodule(plan.having(ROWWISE)[0]), ROWWISE)[0] * group.size()
            slice_linear(block.get_submodule(child), plan.styles[child], width, rank=group.rank(), ranks=group.size())
        for child in plan.having(GATHERED):
            block.get_submodule(child).register_forward_pre_hook(whole)
            block.get_submodule(child).register_forward_hook(own)
        scale_attributes(block, plan, rank=group.rank(), ranks=group.size())
    tokens, layers = model.get_input_embeddings(), f"{largest_list(model)}."  # type: ignore[operator]
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module is not tokens and not name.startswith(layers):
            module.register_forward_hook(scatter)  # of positions, which are those of the whole sequence


def _style(plan: dict[str, str], name: str) -> str | None:
    return plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))


def _check_divides(size: int, tp: int, what: str) -> None:
    if size % tp:
        near = largest_divisor(size, most=tp)
        raise ConfigError("parallel.tp", tp, why=f"it does not divide {what} ({size})", remedy=f"use {near}")


def _gather_input(
    group: dist.ProcessGroup, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gathers [B, T / tp, D] to [B, T, D] before a block with sharded linear layers."""
    if args:
        return (all_gather(args[0], group, dim=_SEQUENCE), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": all_gather(kwargs["hidden_states"], group, dim=_SEQUENCE)}


def _gather_inputs(
    group: dist.ProcessGroup, first: bool, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gathers hidden states among a block's arguments, all or the first, from [B, T / tp, D] to [B, T, D].

    Or tokens [N, D], whose order does not matter.
    """
    states = hidden_states(args, kwargs)

    def whole(each: Any) -> Any:
        if states is None or not isinstance(each, Tensor) or each.shape != states.shape:
            return each
        if first and each is not states:
            return each
        return all_gather(each, group, dim=_SEQUENCE)

    return tuple(whole(each) for each in args), {key: whole(each) for key, each in kwargs.items()}


def _own_positions(group: dist.ProcessGroup, _module: nn.Module, _args: Any, output: Any) -> Any:
    """Keeps this rank's positions of the output [..., T, D] of a module that runs whole, or of all such outputs."""
    several = isinstance(output, (tuple, list))
    shape = output[0].shape if several else output.shape

    def own(each: Any) -> Any:
        if not isinstance(each, Tensor) or each.shape != shape:
            return each
        return each.chunk(group.size(), dim=-2)[group.rank()]

    return tuple(own(each) for each in output) if several else own(output)


class RowwiseConv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, with its input features sharded as in `RowwiseLinear`; the weight is [D_in / tp, D_out]."""

    group: dist.ProcessGroup

    def forward(self, features: Tensor) -> Tensor:
        """Computes [B, T / tp, D_out] from features [B, T, D_in / tp]."""
        out: Tensor = reduce_scatter(features @ self.weight, self.group, dim=_SEQUENCE) + self.bias
        return out


class RowwiseLinear(nn.Linear):
    """A linear layer whose input features are sharded over the ranks of `group`.

    A layer's class is changed in place, without binding a function to it: all layers share one compiled graph.
    """

    group: dist.ProcessGroup

    def forward(self, features: Tensor) -> Tensor:
        """Computes [B, T / tp, D_out] from features [B, T, D_in / tp]; adds the bias once, after the sum over ranks."""
        out = reduce_scatter(self.product(features), self.group, dim=_SEQUENCE)
        return out if self.bias is None else out + self.bias

    def product(self, features: Tensor) -> Tensor:
        """Computes this rank's summand of the output [B, T, D_out], without bias, from features [B, T, D_in / tp]."""
        return F.linear(features, self.weight)


def _shard_embedding(embedding: nn.Embedding, group: dist.ProcessGroup) -> None:
    """Shards an embedding by vocabulary: ids on other ranks give zeros, and the sum over ranks gives every row."""
    rows = embedding.weight.shape[0]
    first = group.rank() * rows
    local_forward = embedding.forward
    if embedding.padding_idx is not None:  # the padding row gets no gradient; only one rank has it
        local_pad = embedding.padding_idx - first
        embedding.padding_idx = local_pad if 0 <= local_pad < rows else None

    def forward(ids: Tensor) -> Tensor:
        local = ids - first
        elsewhere = (local < 0) | (local >= rows)
        vectors: Tensor = local_forward(local.masked_fill(elsewhere, 0))
        return reduce_scatter(vectors.masked_fill(elsewhere.unsqueeze(-1), 0), group, dim=_SEQUENCE)

    embedding.forward = forward  # type: ignore[method-assign, assignment]


def all_reduce_gradients(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sums small gradients over a group, in place, in fp32, with one all-reduce."""
    if not gradients:
        return
    flat = torch.cat([g.detach().float().reshape(-1) for g in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
