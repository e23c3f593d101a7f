"""DeepSpeed engine with pipeline parallelism: the 1F1B schedule over pp x dp x cp x tp, with ZeRO 0 or 1.

`PipelineModule` gets one module per stage, balanced by cost as in the native engine, and DeepSpeed runs its 1F1B
schedule over them. Stages send only hidden states: all stages of a pipeline load the same micro-batches and take them
in order. Ranks are laid out as in `topology`: pp slowest, then data (dp x cp), tp fastest.
Verified with deepspeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import islice
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.schedule import OptimizerStep, TrainSchedule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.topology import Topology
from pipeline.data.loader import IGNORE, MicroBatch, StepBatch
from pipeline.engines.base import (
    NO_LIMITS,
    EvaluationSums,
    FinishedStep,
    HostValues,
    Objective,
    PendingStep,
    UpdateLimits,
    no_host_values,
)
from pipeline.engines.common import update_scales
from pipeline.engines.deepspeed.base import DeepSpeedBase
from pipeline.engines.deepspeed.config import deepspeed_config
from pipeline.engines.deepspeed.local_model import build_local_model
from pipeline.engines.deepspeed.optimizer import make_optimizer
from pipeline.engines.deepspeed.replicated import ReplicatedOptimizer
from pipeline.engines.deepspeed.state import reset_optimizer_state
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.assemble import LocalModel
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.mesh import Mesh, tied_weights_group
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.engines.parallel.stages import is_tied
from pipeline.models.build.initial_values import ParameterValues

_EVALUATION_MICRO_BATCHES = 32
"""Micro-batches per pipeline schedule in an evaluation, with a bubble of pp - 1."""


class DeepSpeedPipeline(DeepSpeedBase):
    """One model, split into pipeline stages. The process group must be initialized.

    Args:
        run: the resolved config, with pp above 1 and ZeRO 0 or 1.
        model: on meta, as `build_meta` made it.
        values: initial values of its parameters.
        objective: the loss.
        device: of this rank.
        mesh: this rank's coordinates and process groups.
    """

    def __init__(
        self,
        run: ResolvedRun,
        model: nn.Module,
        values: ParameterValues,
        objective: Objective,
        *,
        device: torch.device,
        mesh: Mesh,
    ) -> None:
        super().__init__(run, model, objective, device=device, mesh=mesh)
        scales = update_scales(model, run.config.model)
        coordinates = mesh.coordinates
        stage = pipeline_stages(run, model)[coordinates["pp"]]
        self._local_model = build_local_model(
            run, model, values, self._mesh, device=device, balancer=self._balancer, stage=stage
        )
        self._stage_module = _StageModule(self._local_model.decoder, device)
        self._tied_group = tied_weights_group(run.topology) if is_tied(model) else None
        module = _PipelineModule(
            run.topology,
            self._stage_module,
            self._local_model,
            index=coordinates["pp"],
            tied_group=self._tied_group,
        )
        optimizer = make_optimizer(
            run,
            self._local_model,
            scales,
            model_group=module.mpu().get_model_parallel_group(),
            counts_unsharded=coordinates["tp"] == 0,
            update_allowed=self._update_allowed,
        )
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=deepspeed_config(run))
        module.optimizer = self._engine.optimizer
        reset_optimizer_state(self._engine.optimizer)

    def begin_step(
        self,
        step: StepBatch,
        *,
        lr: float,
        limits: UpdateLimits = NO_LIMITS,
        after: PendingStep | None = None,  # noqa: ARG002
        host_values: HostValues = no_host_values,
    ) -> FinishedStep:
        """See `Engine.begin_step`."""
        engine = self._engine
        # DeepSpeed divides the loss by the number of micro-batches in its config
        factor = self._begin(step, lr, limits) * engine.gradient_accumulation_steps()
        batches = [micro.to(self._device) for micro in step.micro_batches]
        self._stage_module.begin(batches, self._objective, factor)
        engine.module.train()
        engine.total_loss, engine._compute_loss = None, True
        engine.set_dataiterator(_pairs(batches))
        engine._exec_schedule(_WithoutStep(len(batches), engine.num_stages, engine.stage_id))
        means = self._means(self._stage_module.sums, step, host_values)
        engine._exec_optimizer_step()
        return self._result(step, means)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> EvaluationSums:
        """See `Engine.evaluate`."""
        nats, targets, rest = torch.zeros((), device=self._device), 0, iter(batches)
        self._engine.reset_activation_shape()  # these batches may have another shape than those trained on
        while part := [micro.to(self._device) for micro in islice(rest, _EVALUATION_MICRO_BATCHES)]:
            self._stage_module.begin(part, CrossEntropy(), 1.0)
            self._engine.eval_batch(
                _pairs(part), compute_loss=False, reduce_output=None, bcast_loss=False, num_micro_batches=len(part)
            )
            nats += self._stage_module.sums[0]
            targets += sum(int((micro.labels != IGNORE).sum()) for micro in part)
        self._engine.reset_activation_shape()
        return self._evaluation_sums(nats, targets)

    def forward_passes(self, batches: Iterable[MicroBatch], objective: Objective) -> None:
        """Not with pipeline parallelism: what would need it is refused before an engine is built."""
        raise NotImplementedError


def _pairs(batches: Sequence[MicroBatch]) -> Iterator[tuple[Tensor, Tensor]]:
    """The data iterator for DeepSpeed: ids for the first stage and labels for the last, whose module has its own."""
    return iter([(batch.input_ids, batch.labels) for batch in batches])


class _WithoutStep(TrainSchedule):  # type: ignore[misc]
    """DeepSpeed's 1F1B schedule without the optimizer step, which follows when every rank knows the loss."""

    def steps(self) -> Iterator[list[Any]]:
        """The instructions of every clock tick of the schedule."""
        for commands in super().steps():
            yield [command for command in commands if not isinstance(command, OptimizerStep)]


class _StageModule(nn.Module):
    """One pipeline stage, which takes a step's micro-batches in the order of their forward passes.

    Args:
        decoder: of the stage.
        device: of this rank.

    Attributes:
        sums: of the loss and its parts over the micro-batches so far; zeros but on the last stage.
    """

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        super().__init__()
        self.decoder, self._device = decoder, device

    def begin(self, batches: Sequence[MicroBatch], objective: Objective, factor: float) -> None:
        """Sets the micro-batches of the coming forward passes; the loss output is multiplied by `factor`."""
        self._micro_batches, self._objective, self._factor = iter(batches), objective, factor
        self.sums = torch.zeros(1 + len(objective.parts), device=self._device)

    def forward(self, inputs: Tensor) -> Tensor:
        """Ids [B, T] or hidden states -> hidden states, or on the last stage the scalar loss."""
        out = self.decoder(inputs, next(self._micro_batches), self._objective)
        if not self.decoder.layout.last:
            hidden: Tensor = out[0]
            return hidden
        self.sums += torch.stack([each.detach() for each in out])
        loss: Tensor = out[0] * self._factor
        return loss


class _PipelineModule(PipelineModule):  # type: ignore[misc]
    """DeepSpeed's `PipelineModule`, of which this rank builds only its own stage.

    Args:
        topology: sizes of the axes.
        own: this rank's stage.
        local_model: this rank's part of the model.
        index: of this stage.
        tied_group: see `parallel.mesh.tied_weights_group`.

    Attributes:
        optimizer: DeepSpeed's, set once it exists; gives access to the gradients.
    """

    optimizer: Any = None

    def __init__(
        self,
        topology: Topology,
        own: _StageModule,
        local_model: LocalModel,
        *,
        index: int,
        tied_group: dist.ProcessGroup | None,
    ) -> None:
        axes = PipeModelDataParallelTopology(num_pp=topology.pp, num_mp=topology.tp, num_dp=topology.dp * topology.cp)
        layers = [own if stage == index else LayerSpec(nn.Identity) for stage in range(topology.pp)]
        with redirect_stdout(StringIO()):  # it prints its layers
            super().__init__(layers, topology=axes, partition_method="uniform")
        self._local_model = local_model
        self._tied_group = tied_group
        named = local_model.decoder.parameters_by_name()
        for name in local_model.tied if index > 0 else ():
            named[name].ds_pipe_replicated = True  # type: ignore[attr-defined]  # the first stage counts its gradient

    def get_tied_weights_and_groups(self) -> list[Any]:
        """All-reduces the gradients of tied weights, at the point where DeepSpeed would, and leaves it nothing to do.

        DeepSpeed's own code reads `grad`, which is None where gradients are accumulated in fp32 apart from the weights.
        """
        for name in sorted(self._local_model.tied):
            gradient = self._gradient(name)
            if gradient is not None:
                dist.all_reduce(gradient, group=self._tied_group)
        return []

    def _gradient(self, name: str) -> Tensor | None:
        if isinstance(self.optimizer, ReplicatedOptimizer):
            return self.optimizer.gradient(name)
        weight = self._local_model.decoder.parameters_by_name()[name]
        candidates = (getattr(weight, attribute, None) for attribute in ("_hp_grad", "grad_accum", "grad"))
        return next((gradient for gradient in candidates if gradient is not None), None)
