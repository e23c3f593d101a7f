"""The teacher in memory, in the student's tensor and context parallelism, and whole or sharded over the data ranks.

It is a decoder of the engine's own, assembled like the student's, without a loss. With tp every rank has the same
columns of the teacher's logits as of the student's, and with cp the same positions. The teacher is not part of a
pipeline: the ranks of the last stage, which compute the loss, have all its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.run import Fp8Section, LossSection, MemorySection, MoeSection
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.parallel.architecture_trial import has_separate_head
from pipeline.engines.parallel.assemble import LocalModel, ShardedValues, assemble
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.parallel.vocabulary import VocabularyShard
from pipeline.models.construction.initial_values import ParameterValues
from pipeline.models.construction.materialize import materialize
from pipeline.run.distillation.divergence import Divergence, divergence_by_position

ROWS = 1024
"""Number of positions whose logits exist at a time when they are written to files."""


@dataclass(frozen=True)
class TeacherModel:
    """A teacher that has been checked against the student.

    Attributes:
        model: the full model, on meta, in the dtype of the run.
    """

    model: nn.Module
    values: ParameterValues


def teacher_run(run: ResolvedRun) -> ResolvedRun:
    """Returns the teacher's run: no pipeline, unsharded experts, nothing recomputed, rounded or balanced."""
    plain = {"memory": MemorySection(), "fp8": Fp8Section(), "loss": LossSection(), "moe": MoeSection()}
    none: dict[str, Any] = {"distill": None, "quantization_aware": None}
    none["parallel"] = run.config.parallel.model_copy(update={"tp_plan": {}})  # the student's
    topology = replace(run.topology, pp=1, ep=1)
    return replace(run, config=run.config.model_copy(update={**plain, **none}), topology=topology)


class Teacher:
    """A frozen teacher on this rank; in a pipeline only the last stage's ranks hold it, since they compute the loss.

    Args:
        found: the teacher's model and values.
        run: the resolved config of the student's run.
        mesh: this rank's coordinates and groups; None for a single process.
    """

    def __init__(self, found: TeacherModel, run: ResolvedRun, *, device: torch.device, mesh: Mesh | None) -> None:
        self._found, self._run, self._device, self._mesh = found, teacher_run(run), device, mesh
        self._shard = run.config.distill is not None and run.config.distill.shard_teacher
        if mesh is None or mesh.coordinates["pp"] == run.rank_of_stage(-1):
            assert self._made  # here rather than in the first step, whose time would include it

    @property
    def decoder(self) -> Decoder:
        """The teacher's decoder, whose forward passes can be recorded."""
        decoder: Decoder = self._made[0]
        return decoder

    @torch.no_grad()
    def targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns the teacher's last hidden states [B, T, D], or logits [B, T, V] if the architecture caps them."""
        decoder, head = self._made
        if head is None:
            return (decoder.logits(batch.input_ids, batch),)
        return (decoder.gathered(decoder.hidden_states(batch.input_ids, batch)),)

    @torch.no_grad()
    def logits(self, batch: MicroBatch) -> Iterator[Tensor]:
        """Yields the logits of a batch on the CPU, [rows, V], chunk by chunk; without tensor parallelism only."""
        _decoder, head = self._made
        [targets] = self.targets(batch.to(self._device))
        for rows in targets.flatten(0, 1).split(ROWS):
            yield rows if head is None else head(rows)

    @torch.no_grad()
    def compare(
        self,
        divergence: Divergence,
        logits: Tensor,
        labels: Tensor,
        *targets: Tensor,
        vocabulary: VocabularyShard,
    ) -> tuple[Tensor, Tensor]:
        """Computes the divergence of the student's logits from the teacher's, and its gradient."""
        nats, gradient = self.compare_by_position(divergence, logits, labels, *targets, vocabulary=vocabulary)
        return nats.sum(), gradient

    @torch.no_grad()
    def compare_by_position(
        self,
        divergence: Divergence,
        logits: Tensor,
        labels: Tensor,
        *targets: Tensor,
        vocabulary: VocabularyShard,
    ) -> tuple[Tensor, Tensor]:
        """Computes the divergence at every position, and the gradient of the sum (`divergence_by_position`)."""
        _decoder, head = self._made
        own = targets[0] if head is None else head(targets[0])
        return divergence_by_position(divergence, own, logits, labels, vocabulary)

    @cached_property
    def _made(self) -> tuple[Any, Any]:
        """The decoder, and its head if the head gives the logits."""
        local = assemble(self._run, self._found.model, self._mesh)
        decoder = local.decoder
        if self._shard and self._mesh is not None and self._mesh.size("data") > 1:
            from pipeline.run.distillation.sharded import shard_layers  # noqa: PLC0415  imports FSDP2

            shard_layers(local, self._found.values, self._mesh, device=self._device)
        else:
            _materialize(local, self._found.values, self._device)
        decoder.eval().requires_grad_(False)
        causal: Any = decoder.causal
        return decoder, causal.get_output_embeddings() if has_separate_head(causal.config) else None


def _materialize(local: LocalModel, values: ParameterValues, device: torch.device) -> None:
    names = {id(parameter): name for name, parameter in local.decoder.parameters_by_name().items()}
    materialize(local.decoder.causal, ShardedValues(values, local), device=device, names=names)
