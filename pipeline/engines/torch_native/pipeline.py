"""Pipeline schedules (GPipe, 1F1B, interleaved 1F1B, zero bubble) of torch.distributed.pipelining over decoder stages.

Stages send each other hidden states only, not labels, positions or documents: every rank of a pipeline loads the same
micro-batches. Virtual stage i of the model is on pipeline rank i % pp.

With ZeRO stages 0 to 2, torch's schedules keep weights and gradients unsharded until the last micro-batch has passed;
then gradients are summed over the data ranks, once per step. With stage 3, weights are gathered layer by layer and
gradients reduce-scattered after every micro-batch, as without a pipeline. That excludes the zero-bubble schedule: it
computes weight gradients separately from input gradients, and torch 2.13 collects the weights before they are gathered,
finds none, and silently loses their gradients.

Shapes: B samples, T positions of this rank, D features. Hidden states are [B, T / tp, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from headrace.base.errors import HeadraceError
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.loader import MicroBatch
from pipeline.engines.base import Objective
from pipeline.engines.common import model_dtype
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.parallel.stages import StageLayers
from pipeline.engines.torch_native.forward_backward import zero_sums


class StageModule(nn.Module):
    """One pipeline stage with the tensor-to-tensor interface of torch's schedules.

    Every schedule runs the forward passes of a stage in the order of the micro-batches, so the n-th forward pass is
    that of micro-batch n.

    Args:
        decoder: of the stage.
        stage: its index and layers.
    """

    def __init__(self, decoder: Decoder, stage: StageLayers) -> None:
        super().__init__()
        self.decoder, self.stage = decoder, stage

    def begin(self, batches: Sequence[MicroBatch], objective: Objective, *, scale: float) -> None:
        """Sets the micro-batches of the coming forward passes, in order."""
        self._micro_batches = iter(batches)
        self._objective, self._scale = objective, scale
        self.sums: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Ids [B, T] or hidden states -> hidden states, or on the last stage the scaled loss [1]."""
        output: tuple[Tensor, ...] = self.decoder(inputs, next(self._micro_batches), self._objective)
        if not self.stage.last:
            return output[0]
        self.sums.append(torch.stack([each.detach() for each in output]).double())
        return torch.stack([output[0] * self._scale])


class PipelineSchedule:
    """The virtual stages of this rank and the schedule that runs them. Building it is collective.

    Args:
        run: the resolved config.
        stage_modules: of this rank, sharded, in stage order.
        mesh: this rank's coordinates and groups.
        hidden_size: D.
        device: of this rank.
    """

    def __init__(
        self,
        run: ResolvedRun,
        stage_modules: Sequence[StageModule],
        mesh: Mesh,
        *,
        hidden_size: int,
        device: torch.device,
    ) -> None:
        group = mesh.group("pp")
        assert group is not None
        self._stage_modules, self._group, self._device = stage_modules, group, device
        self._hidden_size, self._dtype, self._tp = hidden_size, model_dtype(run.config), run.topology.tp
        self._ids = torch.empty(
            run.batch.micro, run.batch.sequence_length // run.topology.cp, dtype=torch.int64, device="meta"
        )
        kind = run.config.parallel.schedule_kind
        assert not kind.splits_backward or run.config.zero_optimization.stage < 3, "see above"
        self._kind: Any = getattr(schedules, kind.torch)
        self._micro_batches, self._schedule = 0, cast(Any, None)
        shares = run.batch.shares
        self._prepare(run.batch.accumulation if shares is None else len(shares.sizes[mesh.coordinates["dp"]]))

    def _prepare(self, micro_batches: int) -> None:
        """Builds the schedule for a number of micro-batches, which changes with the rank's share of a batch."""
        if micro_batches == self._micro_batches:
            return
        stages = [self._pipeline_stage(module, self._ids) for module in self._stage_modules]
        schedule_stages: Any = stages[0] if issubclass(self._kind, schedules.PipelineScheduleSingle) else stages
        # the loss is a sum over targets: gradients of micro-batches add up without division
        self._schedule = self._kind(schedule_stages, micro_batches, loss_fn=_output_is_loss, scale_grads=False)
        self._micro_batches = micro_batches

    def train(self, batches: Sequence[MicroBatch], objective: Objective, *, scale: float) -> Tensor:
        """See `ForwardBackward.train`."""
        self._prepare(len(batches))
        for module in self._stage_modules:
            module.begin(batches, objective, scale=scale)
        first = self._stage_modules[0].stage.first
        ids = [torch.cat([batch.input_ids for batch in batches])] if first else []
        try:
            self._schedule.step(*ids, target=torch.zeros(self._micro_batches, device=self._device))
        except RuntimeError as error:
            raise _own_error(error) from error
        return sum((each for module in self._stage_modules for each in module.sums), zero_sums(objective, self._device))

    def score(self, batch: MicroBatch, objective: Objective) -> Tensor:
        """See `ForwardBackward.score`. Batches pass through the stages one at a time, without overlap."""
        sums = zero_sums(objective, self._device)
        for module in self._stage_modules:
            module.begin([batch], objective, scale=1.0)
            stage = module.stage
            output = module(batch.input_ids if stage.first else self._receive(batch, stage))
            if stage.last:
                sums += module.sums[0]
            else:
                dist.send(output, dst=self._rank_of_stage(stage.index + 1), group=self._group)
        return sums

    def _receive(self, batch: MicroBatch, stage: StageLayers) -> Tensor:
        hidden = self._empty_hidden_states(batch.input_ids, self._device)
        dist.recv(hidden, src=self._rank_of_stage(stage.index - 1), group=self._group)
        return hidden

    def _rank_of_stage(self, index: int) -> int:
        """Global rank of the pipeline rank that holds a stage."""
        return dist.get_global_rank(self._group, index % dist.get_world_size(self._group))

    def _empty_hidden_states(self, ids: Tensor, device: torch.device | str) -> Tensor:
        samples, positions = ids.shape
        return torch.empty(samples, positions // self._tp, self._hidden_size, dtype=self._dtype, device=device)

    def _pipeline_stage(self, module: StageModule, ids: Tensor) -> PipelineStage:
        stage, hidden = module.stage, self._empty_hidden_states(ids, "meta").requires_grad_()
        return PipelineStage(
            module,
            stage.index,
            stage.count,
            self._device,
            input_args=ids if stage.first else hidden,
            output_args=torch.empty(1, device="meta", requires_grad=True) if stage.last else hidden,
            group=self._group,
        )


def _output_is_loss(loss: Tensor, _target: Tensor) -> Tensor:
    """Loss function for torch's schedules: the output of the last stage already is the loss."""
    return loss.sum()


def _own_error(error: BaseException) -> BaseException:
    """An error of ours that torch's schedules have wrapped into theirs; any other as it is."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, HeadraceError):
        found = found.__cause__
    return found or error
