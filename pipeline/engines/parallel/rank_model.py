"""Sizes of a rank's tensors and computation: inputs of the formulas for memory (`memory`) and traffic (`traffic`).

Shapes: B samples, T positions of this rank, D hidden size, H heads, K key/value heads, d head size, I intermediate
size, V ids, E experts, k of them per token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from pipeline.engines.optim.newton_schulz import flops
from pipeline.engines.parallel.experts import expert_modules
from pipeline.engines.parallel.stage_plan import stage_plan
from pipeline.engines.parallel.stages import StageLayers, is_tied
from pipeline.engines.parallel.tensor import check_tp_plan
from pipeline.engines.parallel.tensor_styles import COLWISE, HEADS, NO_TABLE, ROWWISE
from pipeline.models.hidden_matrices import MatrixForm
from pipeline.models.layers import differ

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Widths:
    """Sizes of a decoder layer, of the full model.

    Attributes:
        hidden: D.
        query: H x d.
        key_value: K x d.
        heads: H.
        head_size: d.
        intermediate: I; in a mixture of experts, the size of one expert.
        dense: I in layers without experts.
        experts: number of experts per token (k); 0 for a dense model.
        vocabulary: V.
        head_norms: whether queries and keys are normalized.
        all_experts: E.
        shared: total intermediate size of the shared experts.
        output: width of attention's output, before its projection; 0 if it is H x d.
        latent: total width of query, key and value latents (multi-head latent attention); 0 for other attention.
    """

    hidden: int
    query: int
    key_value: int
    heads: int
    head_size: int
    intermediate: int
    experts: int
    vocabulary: int
    head_norms: bool
    dense: int = 0
    all_experts: int = 0
    shared: int = 0
    output: int = 0
    latent: int = 0


@dataclass(frozen=True)
class RankModel:
    """One rank's part of the model.

    Attributes:
        layers: elements of every decoder layer of this rank's stages, after tensor and expert parallelism.
        rest: elements of embedding, final norm and head on this rank, after tensor parallelism.
        head: elements of the head; 0 on ranks without it. A tied head is the embedding.
        largest: elements of the largest parameter.
        small: elements that tensor parallelism does not shard (norms).
        tied: elements of a tied embedding and head on two stages; 0 if there are none.
        first: whether the rank has the embedding.
        last: whether the rank has the head.
        stage_layers: number of decoder layers in each (virtual) stage of the rank.
        matrices: elements that Muon treats as hidden matrices, after tensor parallelism; 0 for other optimizers.
        matrix_flops: FLOPs to orthogonalize all these matrices in a step, including those of the tp group's other
            ranks.
        largest_matrix_flops: FLOPs to orthogonalize the largest stored matrix: one rank computes at least this.
        experts: elements of every decoder layer that expert parallelism shards, with their own unit and group. Zeros
            without expert parallelism.
    """

    layers: tuple[int, ...]
    rest: int
    head: int
    largest: int
    small: int
    tied: int
    first: bool
    last: bool
    stage_layers: tuple[int, ...]
    experts: tuple[int, ...]
    matrices: int = 0
    matrix_flops: int = 0
    largest_matrix_flops: int = 0

    @property
    def stages(self) -> int:
        """Number of (virtual) stages on the rank."""
        return len(self.stage_layers)

    @cached_property
    def parameters(self) -> int:
        """Total number of elements."""
        return sum(self.layers) + self.rest

    def apart(self) -> tuple[RankModel, RankModel]:
        """Separates parameters sharded over all data ranks from experts, sharded over the ranks that have them."""
        return self._apart

    @cached_property
    def _apart(self) -> tuple[RankModel, RankModel]:
        none = (0,) * len(self.layers)
        rest = tuple(whole - own for whole, own in zip(self.layers, self.experts, strict=True))
        matrices = min(self.matrices, sum(self.experts))
        return (
            replace(self, layers=rest, experts=none, matrices=self.matrices - matrices),
            replace(self, layers=self.experts, rest=0, head=0, matrices=matrices),
        )

    @property
    def separate(self) -> bool:
        """Whether embedding and head are gathered separately: they are not one weight on one stage."""
        return not (self.first and self.last) or self.rest >= 2 * self.head


def widths_of(config: Any) -> Widths | None:
    """Returns sizes from a Hugging Face config; None for a decoder not built like Llama's, with layers of one size."""
    if differ(config):
        return None
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    if not heads or not hidden or not isinstance(inner, int):
        return None
    size = getattr(config, "head_dim", None) or hidden // heads
    experts = next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), 0)
    found = Widths(
        hidden=hidden,
        query=heads * size,
        key_value=(getattr(config, "num_key_value_heads", None) or heads) * size,
        heads=heads,
        head_size=size,
        intermediate=inner,
        experts=config.num_experts_per_tok if experts else 0,
        vocabulary=config.vocab_size,
        head_norms=config.model_type.startswith("qwen3"),
        dense=getattr(config, "intermediate_size", None) or inner,
        all_experts=experts,
        shared=(getattr(config, "n_shared_experts", None) or 0) * inner,
    )
    return _with_latent(found, config) if getattr(config, "kv_lora_rank", None) else found


def _with_latent(widths: Widths, config: Any) -> Widths:
    """Adds the widths of multi-head latent attention, where one product makes keys and values.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
    """
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    heads = widths.heads
    return replace(
        widths,
        query=heads * (nope + rope),
        key_value=heads * (nope + rope + nope + value) // 2,
        head_size=nope + rope,
        output=heads * value,
        latent=(config.q_lora_rank or 0) + config.kv_lora_rank + rope,
    )


@dataclass(frozen=True)
class Footprint:
    """Sizes of a model under a layout.

    Attributes:
        widths: sizes of a decoder layer.
        ranks: part of the model on each pipeline rank; one part without pipeline parallelism.
    """

    widths: Widths
    ranks: tuple[RankModel, ...]


class ParameterCount(NamedTuple):
    """Counts of a parameter.

    Attributes:
        name: name of the parameter in the full model.
        elements: elements on a rank, before sharding over data ranks.
        split: whether tensor-parallel ranks have different parts.
        expert: whether expert parallelism shards the parameter.
        matrix_flops: FLOPs to orthogonalize the parameter's matrices; 0 if the optimizer does not treat it as matrices.
        stacked: number of experts in the parameter, or 1.
    """

    name: str
    elements: int
    split: bool
    expert: bool
    matrix_flops: int
    stacked: int


def counts_of(
    model: nn.Module,
    *,
    tp: int,
    ep: int = 1,
    matrices: Mapping[str, MatrixForm],
    table: Mapping[str, str] = NO_TABLE,
) -> list[ParameterCount]:
    """Counts every parameter of a full model, on meta.

    Args:
        model: the full model, on meta.
        tp: tensor-parallel ranks.
        ep: ranks among which the experts of a layer are divided.
        matrices: forms of the parameters that the optimizer treats as hidden matrices, by name.
        table: the config's `parallel.tp_plan`.
    """
    experts = {id(p) for _, module in expert_modules(model) for p in module.parameters()} if ep > 1 else set()
    styles = check_tp_plan(model, tp=tp, table=table) if tp > 1 else {}
    sharded = {name for name, style in styles.items() if style in (COLWISE, ROWWISE, HEADS)}
    ends: Any = model
    vocabulary = {id(ends.get_input_embeddings().weight), id(ends.get_output_embeddings().weight)}
    return [
        ParameterCount(
            name,
            p.numel() // (ep if expert else tp if split else 1),
            split or expert,
            expert,
            *_matrix_flops(matrices.get(name)),
        )
        for name, p in model.named_parameters()
        for split in [not sharded.isdisjoint((name, name.rpartition(".")[0])) or id(p) in vocabulary]
        for expert in [id(p) in experts]
    ]


def _matrix_flops(form: MatrixForm | None) -> tuple[int, int]:
    """Returns (FLOPs to orthogonalize all experts' matrices, number of experts)."""
    return (0, 1) if form is None else (form.stacked * sum(flops(*each) for each in form.matrices), form.stacked)


def rank_model(
    model: nn.Module,
    counts: Sequence[ParameterCount],
    stages: Sequence[StageLayers],
    *,
    before: tuple[str, ...],
    tp: int,
) -> RankModel:
    """Counts a rank's tensors and computation for its (virtual) stages of a model.

    Args:
        model: the full model, on meta.
        counts: counts of the model's parameters.
        stages: the rank's stages, in order; their costs are not used.
        before: name prefixes of the parameters before the layers (`first_prefixes`); empty without a pipeline.
        tp: tensor-parallel ranks.
    """
    first, last = stages[0].first, stages[-1].last
    layers = {layer: 0 for stage in stages for layer in range(*stage.layers)}
    experts = dict(layers)
    tied, split_up = is_tied(model), stages[0].count > 1
    rest = small = largest = matrices = matrix_flops = largest_matrix = 0
    for name, count, split, expert, of_matrix, stacked in counts:
        layer = layer_of(name)
        if layer is None and (not split_up or _at_end(name, before, first=first, last=last, tied=tied)):
            rest += count
        elif layer in layers:
            layers[layer] += count
            experts[layer] += count if expert else 0
        else:
            continue
        small, largest = small + (0 if split or tp == 1 else count), max(largest, count)
        matrices, matrix_flops = matrices + (count if of_matrix else 0), matrix_flops + of_matrix
        largest_matrix = max(largest_matrix, of_matrix // stacked)
    head = model.get_output_embeddings().weight.numel() // tp  # type: ignore[operator]
    if tied and split_up and first and last:  # each of the two stages has a copy
        rest += head
    return RankModel(
        layers=tuple(layers.values()),
        rest=rest,
        head=head if last else 0,
        largest=largest,
        small=small,
        tied=head if tied and split_up and first != last else 0,
        first=first,
        last=last,
        stage_layers=tuple(len(range(*stage.layers)) for stage in stages),
        experts=tuple(experts.values()),
        matrices=matrices,
        matrix_flops=matrix_flops,
        largest_matrix_flops=largest_matrix,
    )


def first_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Returns name prefixes of the parameters that belong to the first stage of a pipeline: those before the layers."""
    return tuple(f"{name}." for name in stage_plan(model).before)


def layer_of(name: str) -> int | None:
    """Returns the index of a parameter's decoder layer; None outside the layers."""
    found = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
    return int(found[1]) if found else None


def _at_end(name: str, before: tuple[str, ...], *, first: bool, last: bool, tied: bool) -> bool:
    """Whether a parameter outside the layers is on a rank with the first or the last stage."""
    return first or (last and tied) if name.startswith(before) else last
