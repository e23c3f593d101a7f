"""Builds this rank's decoder from the full model: checkpointing, stage, expert and tensor parallelism, compilation.

One function applies these techniques in one order. The result is still on meta; an engine shards and materializes it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.topology import sequence_chunks
from pipeline.engines.parallel.activation_checkpointing import apply_activation_checkpointing
from pipeline.engines.parallel.architecture_trial import has_separate_head
from pipeline.engines.parallel.compilation import apply_compile
from pipeline.engines.parallel.context import make_cp_attention
from pipeline.engines.parallel.decoder import Decoder, DecoderLayout, local_owners, parameter_owners
from pipeline.engines.parallel.expert_balance import ExpertBalancer
from pipeline.engines.parallel.experts import apply_expert_parallel, exchanges
from pipeline.engines.parallel.fp8 import apply_fp8
from pipeline.engines.parallel.fused_kernels import exchange_of
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.parallel.multi_token import SequenceParts
from pipeline.engines.parallel.quantization_aware import apply_quantization_aware
from pipeline.engines.parallel.recurrent import SequenceRanks, apply_recurrent, recurrent_blocks
from pipeline.engines.parallel.ring import RingAttention
from pipeline.engines.parallel.stages import StageLayers, keep_stage
from pipeline.engines.parallel.tensor import TensorParallel, apply_tensor_parallel
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction.counter import CPU
from pipeline.models.construction.initial_values import ParameterValues
from pipeline.models.construction.rectangle import Rectangle
from pipeline.models.multi_token import modules_of


@dataclass(frozen=True)
class LocalModel:
    """This rank's part of a model, on meta.

    Attributes:
        decoder: the root module.
        tensor: tensor-parallel shards of this rank, or None.
        shapes: Hugging Face name -> full shape of every parameter of the decoder.
        experts: Hugging Face name -> this rank's experts, for every parameter that expert parallelism shards.
        tied: names of the parameters that another pipeline stage also has (a head tied to the embedding).
    """

    decoder: Decoder
    tensor: TensorParallel | None
    shapes: dict[str, tuple[int, ...]]
    tied: frozenset[str]
    experts: dict[str, Rectangle]

    def box(self, name: str) -> Rectangle | None:
        """Returns this rank's tensor- or expert-parallel shard of a parameter; None if it has none."""
        return self.experts.get(name) or (self.tensor.boxes.get(name) if self.tensor else None)


def assemble(
    run: ResolvedRun,
    model: nn.Module,
    mesh: Mesh | None,
    *,
    stage: StageLayers | None = None,
    balancer: ExpertBalancer | None = None,
) -> LocalModel:
    """Reduces a copy of a model to this rank's part.

    Args:
        run: the resolved config.
        model: the full model, on meta; not changed.
        mesh: this rank's coordinates and groups; None for one process.
        stage: the pipeline stage to build; None for the full model.
        balancer: balancer that observes the experts' routers; None for a dense model.

    Raises:
        ConfigError: the architecture does not support the layout.
    """
    causal = copy.deepcopy(model)
    owners = parameter_owners(causal)
    shapes = {name: tuple(p.shape) for name, p in causal.named_parameters()}
    # before keep_stage, to select every n-th layer of the full model
    apply_activation_checkpointing(causal, run.config.memory, random=run.plain)
    if stage is not None and stage.count > 1:
        keep_stage(causal, stage)
    local = local_owners(owners, causal)
    tied = frozenset(name for name, pairs in local.items() if len(pairs) < len(owners[name]))
    if stage is not None and stage.count > 1 and modules_of(model) and (stage.first or stage.last):
        tied |= _embedding_names(causal, local)
    names = _names(local)
    ep_group = mesh.group("ep") if mesh and run.topology.ep > 1 else None  # a teacher's run has none
    tp_group = mesh.group("tp") if mesh else None
    exchange = exchange_of(run)
    experts = apply_expert_parallel(causal, ep_group, names=names, exchange=exchange) if ep_group else {}
    rest = {key: name for key, name in names.items() if name not in experts}
    table = run.config.parallel.tp_plan
    tensor = apply_tensor_parallel(causal, tp_group, names=rest, table=table) if tp_group else None
    sequence = SequenceRanks(tp_group, mesh.group("cp") if mesh else None, run.zigzag)
    blocks = recurrent_blocks(causal) if sequence.groups or run.config.data.mask_documents else {}
    recurrent = apply_recurrent(causal, sequence, blocks=blocks)
    apply_fp8(causal, run.config.fp8)
    apply_quantization_aware(causal, run.config.quantization_aware)
    cp, cp_rank = (run.topology.cp, mesh.coordinates["cp"]) if mesh else (1, 0)
    chunks = sequence_chunks(run.batch.sequence_length, cp=cp, cp_rank=cp_rank, zigzag=run.zigzag)
    chunk = loss_chunk(run, causal.config)
    layout = DecoderLayout(
        first=stage is None or stage.first,
        last=stage is None or stage.last,
        tensor=tensor,
        cp_attention=make_cp_attention(run.config.parallel.cp_method, mesh) if mesh else None,
        chunks=chunks,
        cp_size=cp,
        chunk=chunk,
        own_attention=causal.config._attn_implementation == ATTENTION_NAME,  # type: ignore[union-attr]
        dtype=next(model.parameters()).dtype,
        own_head=_needs_own_head(causal, stage, tensor, chunk),
        recurrent=recurrent,
        sequence=_sequence(run, mesh) if modules_of(causal) and cp > 1 else None,
    )
    decoder = Decoder(causal, layout, local)
    if balancer is not None:
        balancer.attach(causal)
        decoder.balancer = balancer
    # the balancer's hooks, the experts' exchange, ring attention's messages and recurrent blocks run between graphs
    parts = isinstance(layout.cp_attention, RingAttention) or recurrent is not None
    one_graph = balancer is None and not exchanges(causal) and not parts
    apply_compile(causal, run.config.compile, whole_graph=one_graph)
    return LocalModel(decoder, tensor, {name: shapes[name] for name in local}, tied, experts)


DISTILLATION_CHUNK = 512
"""Default of a distillation for the positions per sample whose logits (teacher's and student's) exist at a time."""


def loss_chunk(run: ResolvedRun, config: PretrainedConfig) -> int | None:
    """Returns the number of positions in a chunk of the loss; None if all logits exist at once.

    Args:
        run: the resolved config.
        config: the model's Hugging Face config. By default a distillation chunks the loss if the model's logits are its
            head's output.
    """
    if run.config.loss.chunk is not None or run.config.distill is None or run.plain:
        return run.config.loss.chunk
    return DISTILLATION_CHUNK if has_separate_head(config) else None


def _needs_own_head(
    causal: nn.Module, stage: StageLayers | None, tensor: TensorParallel | None, chunk: int | None
) -> bool:
    """Whether the head runs outside of the model's forward pass, in which the model does more than its product."""
    whole = (stage is None or stage.count == 1) and tensor is None and chunk is None and not modules_of(causal)
    return not whole and (stage is None or stage.last) and not has_separate_head(causal.config)


def _embedding_names(causal: nn.Module, owners: dict[str, list[tuple[nn.Module, str]]]) -> set[str]:
    """Names of the embedding's weights, of which the last stage has copies for modules that predict more tokens."""
    embedding = causal.get_input_embeddings()  # type: ignore[operator]
    return {name for name, pairs in owners.items() if any(module is embedding for module, _ in pairs)}


def _sequence(run: ResolvedRun, mesh: Mesh | None) -> SequenceParts:
    """The parts of a sequence that the ranks of this rank's cp group have."""
    group = mesh.group("cp") if mesh else None
    assert group is not None
    cp, length = run.topology.cp, run.batch.sequence_length
    parts = [sequence_chunks(length, cp=cp, cp_rank=rank, zigzag=run.zigzag) for rank in range(cp)]
    return SequenceParts(group, tuple(each for part in parts for each in part))


def _names(owners: dict[str, list[tuple[nn.Module, str]]]) -> dict[int, str]:
    return {id(getattr(*pairs[0])): name for name, pairs in owners.items()}


class ShardedValues:
    """Values of this rank's tensor-parallel shards.

    Args:
        values: values of the full parameters.
        local_model: this rank's part of the model, which defines the shards.
    """

    def __init__(self, values: ParameterValues, local_model: LocalModel) -> None:
        self._values, self._local_model = values, local_model

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        """Implements `ParameterValues.value` for this rank's shard of a parameter; `box` counts within the shard."""
        shard = self._local_model.box(name)
        if shard is not None:
            box = shard if box is None else box.shifted(shard.offsets)
        return self._values.value(name, box=box, device=device)

    def buffer(self, name: str) -> Tensor | None:
        """Implements `ParameterValues.buffer`: whole on every rank."""
        return self._values.buffer(name)
