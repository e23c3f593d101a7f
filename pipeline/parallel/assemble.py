"""From a whole model on meta to this rank's decoder: recomputation, then stage, then tensor parallelism.

One function, one visible order. What comes out is still on meta; an engine shards it and gives it its values.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import Tensor, nn

from headrace.base.errors import ConfigError
from pipeline.checkpoint.shards import Rectangle
from pipeline.config.rules import ResolvedRun
from pipeline.models.attention import NAME
from pipeline.models.values import ParameterValues
from pipeline.parallel.activation_checkpointing import apply_activation_checkpointing
from pipeline.parallel.context import make_exchange
from pipeline.parallel.costs import describe, forward_flops
from pipeline.parallel.decoder import Decoder, DecoderLayout, owners_of
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.stages import StageLayers, cut_to_stage, split
from pipeline.parallel.tensor import TensorParallel, apply_tensor_parallel


@dataclass(frozen=True)
class Assembled:
    """This rank's part of a model, on meta.

    Attributes:
        decoder: the root module.
        tensor: what tensor parallelism cut, or None.
        shapes: Hugging Face name -> full shape of every parameter of the decoder.
        shared: names that another pipeline stage holds too (a head tied to the embedding).
    """

    decoder: Decoder
    tensor: TensorParallel | None
    shapes: dict[str, tuple[int, ...]]
    shared: frozenset[str]

    def box(self, name: str) -> Rectangle | None:
        """This rank's part of a parameter that tensor parallelism cut; None for a whole one."""
        return self.tensor.boxes.get(name) if self.tensor else None


def stages_of(run: ResolvedRun, model: nn.Module) -> list[StageLayers]:
    """The stages of a model, over all pipeline ranks and pieces per rank; one when there is no pipeline.

    Raises:
        ConfigError: see `split` and `layer_list`.
    """
    count = run.topology.pp * run.virtual_stages
    if count == 1:
        return [StageLayers(0, 1, (0, model.config.num_hidden_layers), 0.0)]  # type: ignore[union-attr, arg-type]
    layers: int = model.config.num_hidden_layers  # type: ignore[union-attr, assignment]
    if layers < count:
        pieces = run.virtual_stages
        why = f"{run.topology.pp} ranks x {pieces} pieces are {count}, and the model has {layers} decoder layers"
        fits = f"use parallel.pp {max(1, layers // pieces)}" + (", or fewer virtual_stages" if pieces > 1 else "")
        raise ConfigError("parallel.pp", run.topology.pp, why=why, remedy=fits)
    flops, head = forward_flops(model, sequence_length=run.batch.sequence_length)
    return split(flops, head=head, stages=count)


def stage_lines(run: ResolvedRun, model: nn.Module) -> list[str]:
    """What every pipeline stage has, one line each; none without a pipeline. See `costs.describe`."""
    return describe(model, stages_of(run, model)) if run.topology.pp > 1 else []


def assemble(run: ResolvedRun, model: nn.Module, mesh: Mesh | None, *, stage: StageLayers | None = None) -> Assembled:
    """Cuts a copy of a model down to what this rank computes.

    Args:
        run: the resolved config.
        model: whole, on meta; not changed.
        mesh: this rank's place; None for one process.
        stage: the piece to make; the whole model when None.

    Raises:
        ConfigError: the architecture cannot be cut so.
    """
    causal = copy.deepcopy(model)
    owners = owners_of(causal)
    shapes = {name: tuple(p.shape) for name, p in causal.named_parameters()}
    apply_activation_checkpointing(causal, run.config.memory)  # before the cut: every n-th layer is of the whole model
    if stage is not None and stage.count > 1:
        cut_to_stage(causal, stage)
    here = set(causal.modules())
    kept = {name: [place for place in places if place[0] in here] for name, places in owners.items()}
    owners_here = {name: places for name, places in kept.items() if places}
    shared = frozenset(name for name, places in owners_here.items() if len(places) < len(owners[name]))
    group = mesh.group("tp") if mesh else None
    tensor = apply_tensor_parallel(causal, group, names=_names(owners_here)) if group else None
    cp_rank = mesh.place["cp"] if mesh else 0
    form = DecoderLayout(
        first=stage is None or stage.first,
        last=stage is None or stage.last,
        tensor=tensor,
        exchange=make_exchange(run.config.parallel.cp_method, mesh) if mesh else None,
        offset=cp_rank * run.batch.sequence_length // run.topology.cp,
        pieces=run.topology.cp if mesh else 1,
        chunk=run.config.loss.chunk,
        own_attention=causal.config._attn_implementation == NAME,  # type: ignore[union-attr]
    )
    decoder = Decoder(causal, form, owners_here)
    return Assembled(decoder, tensor, {name: shapes[name] for name in owners_here}, shared)


def _names(owners: dict[str, list[tuple[nn.Module, str]]]) -> dict[int, str]:
    return {id(getattr(*places[0])): name for name, places in owners.items()}


class ShardedValues:
    """Values of a model whose parameters are boxes of the whole ones.

    Args:
        values: of the whole parameters.
        assembled: says which boxes.
    """

    def __init__(self, values: ParameterValues, assembled: Assembled) -> None:
        self._values, self._assembled = values, assembled

    def value(self, name: str) -> Tensor:
        """This rank's part of a parameter, fp32 on the CPU. The whole one exists for the time of the call."""
        whole, box = self._values.value(name), self._assembled.box(name)
        if box is None:
            return whole
        return whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].clone()
