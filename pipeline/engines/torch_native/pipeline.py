"""Forward and backward passes of a step through a pipeline: torch's schedules over stages of the decoder.

Only hidden states travel. Labels, positions and documents do not: every rank of a pipeline loads the same
micro-batches, and a stage looks up its own. Piece i of the model is on pipeline rank i % pp.

With sharding stages 0 to 2 torch's schedules keep weights and gradients whole until the last micro-batch has gone
through; then gradients are summed over the data ranks, once per step. With stage 3 weights are gathered layer by layer
and gradients sharded after every micro-batch, as without a pipeline. That excludes the zero-bubble schedule: it takes
the gradients of the weights apart from those of the inputs, and torch 2.13 looks for the weights before they are
gathered, finds none, and loses their gradients without a word.

Shapes: B samples, T positions of this rank, D features. Hidden states are [B, T / tp, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from pipeline.config.rules import ResolvedRun
from pipeline.data.loader import MicroBatch
from pipeline.engines.base import Objective
from pipeline.engines.common import model_dtype
from pipeline.engines.torch_native.passes import zeros
from pipeline.parallel.decoder import Decoder
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.stages import StageLayers

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


class StageModule(nn.Module):
    """One stage of the model, as torch's schedules see it: a tensor goes in, a tensor comes out.

    Every schedule sends the micro-batches forward through a stage in their order, so that counting says which it is.

    Args:
        decoder: of the stage.
        stage: which.
    """

    def __init__(self, decoder: Decoder, stage: StageLayers) -> None:
        super().__init__()
        self.decoder, self.stage = decoder, stage

    def begin(self, batches: Sequence[MicroBatch], objective: Objective, *, scale: float) -> None:
        """Tells what comes: the next forward pass is that of the first batch."""
        self._coming = iter(batches)
        self._objective, self._scale = objective, scale
        self.sums: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Ids [B, T] or hidden states -> hidden states, or on the last stage the scaled loss [1]."""
        output: tuple[Tensor, ...] = self.decoder(inputs, next(self._coming), self._objective)
        if not self.stage.last:
            return output[0]
        self.sums.append(torch.stack([each.detach() for each in output]).double())
        return torch.stack([output[0] * self._scale])


class Pipeline:
    """The pieces of this rank and the schedule that runs them. Building it is collective.

    Args:
        run: the resolved config.
        pieces: of this rank, sharded, in the order of their stages.
        mesh: this rank's place.
        width: D.
        device: of this rank.
    """

    def __init__(
        self, run: ResolvedRun, pieces: Sequence[StageModule], mesh: Mesh, *, width: int, device: torch.device
    ) -> None:
        group = mesh.group("pp")
        assert group is not None
        self._pieces, self._group, self._device = pieces, group, device
        self._width, self._dtype, self._tp = width, model_dtype(run.config), run.topology.tp
        self._count = run.batch.accumulation
        ids = torch.empty(
            run.batch.micro, run.batch.sequence_length // run.topology.cp, dtype=torch.int64, device="meta"
        )
        stages = [self._stage(piece, ids) for piece in pieces]
        kind = _SCHEDULES[run.config.parallel.schedule]
        assert kind is not ScheduleInterleavedZeroBubble or run.config.zero_optimization.stage < 3, "see above"
        single = issubclass(kind, PipelineScheduleSingle)
        # the loss is a sum over targets: micro-batches add up, and nothing is to be divided
        self._schedule = kind(stages[0] if single else stages, self._count, loss_fn=_given, scale_grads=False)

    def train(self, batches: Sequence[MicroBatch], objective: Objective, *, scale: float) -> Tensor:
        """See `Passes.train`."""
        assert len(batches) == self._count
        for piece in self._pieces:
            piece.begin(batches, objective, scale=scale)
        first = self._pieces[0].stage.first
        ids = [torch.cat([batch.input_ids for batch in batches])] if first else []
        self._schedule.step(*ids, target=torch.zeros(self._count, device=self._device))
        return sum((each for piece in self._pieces for each in piece.sums), zeros(objective, self._device))

    def score(self, batch: MicroBatch, objective: Objective) -> Tensor:
        """See `Passes.score`. Batches go through one after another."""
        sums = zeros(objective, self._device)
        for piece in self._pieces:
            piece.begin([batch], objective, scale=1.0)
            stage = piece.stage
            output = piece(batch.input_ids if stage.first else self._receive(batch, stage))
            if stage.last:
                sums += piece.sums[0]
            else:
                dist.send(output, dst=self._neighbour(stage.index + 1), group=self._group)
        return sums

    def _receive(self, batch: MicroBatch, stage: StageLayers) -> Tensor:
        hidden = self._hidden(batch.input_ids, self._device)
        dist.recv(hidden, src=self._neighbour(stage.index - 1), group=self._group)
        return hidden

    def _neighbour(self, index: int) -> int:
        """Global rank of the pipeline rank that has a stage."""
        return dist.get_global_rank(self._group, index % dist.get_world_size(self._group))

    def _hidden(self, ids: Tensor, device: torch.device | str) -> Tensor:
        samples, positions = ids.shape
        return torch.empty(samples, positions // self._tp, self._width, dtype=self._dtype, device=device)

    def _stage(self, piece: StageModule, ids: Tensor) -> PipelineStage:
        stage, hidden = piece.stage, self._hidden(ids, "meta").requires_grad_()
        return PipelineStage(
            piece,
            stage.index,
            stage.count,
            self._device,
            input_args=ids if stage.first else hidden,
            output_args=torch.empty(1, device="meta", requires_grad=True) if stage.last else hidden,
            group=self._group,
        )


def _given(loss: Tensor, _target: Tensor) -> Tensor:
    """The last stage's output is the loss already."""
    return loss.sum()
