"""DeepSpeed engine with pipeline parallelism: the 1F1B schedule over pp x dp x cp x tp, with ZeRO 0 or 1.

`PipelineModule` gets one module per stage, balanced by cost as in the native engine, and DeepSpeed runs its 1F1B
schedule over them. Stages send hidden states, and with some architectures more (`stage_messages`), but no labels: all
stages of a pipeline load the same micro-batches, in the same order. Ranks are laid out as in `topology`: pp slowest,
then data (dp x cp), tp fastest. Verified with deepspeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import groupby, islice
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.schedule import OptimizerStep, TrainSchedule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.topology import Topology
from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.engines.base import (
    NO_LIMITS,
    FinishedStep,
    HostValues,
    Objective,
    PendingStep,
    UpdateLimits,
    no_host_values,
)
from pipeline.engines.deepspeed.base import DeepSpeedBase
from pipeline.engines.deepspeed.config import deepspeed_config
from pipeline.engines.deepspeed.local_model import build_local_model
from pipeline.engines.deepspeed.replicated import ReplicatedOptimizer
from pipeline.engines.parallel.assemble import LocalModel
from pipeline.engines.parallel.compilation import compiles, eager
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.engines.parallel.stage_messages import receive_shapes, send_shapes
from pipeline.models.construction.initial_values import ParameterValues

_EVALUATION_MICRO_BATCHES = 32
"""Number of micro-batches per pipeline schedule in an evaluation; the bubble is pp - 1."""


class DeepSpeedPipeline(DeepSpeedBase):
    """One model, split into pipeline stages, with ZeRO 0 or 1."""

    _mesh: Mesh

    def _build(self, run: ResolvedRun, model: nn.Module, values: ParameterValues) -> None:
        super()._build(run, model, values)
        self._run, self._known = run, set[torch.Size]()
        index = self._mesh.coordinates["pp"]
        stage = pipeline_stages(run, model)[index]
        self._local_model = build_local_model(
            run, model, values, self._mesh, device=self._device, balancer=self._balancer, stage=stage
        )
        self._stage_module = _MicroBatchStage(self._local_model.decoder, self._device)
        module = _PipelineModule(
            run.topology, self._stage_module, self._local_model, index=index, tied_group=self._tied_group
        )
        self._initialize(run, module, config=deepspeed_config(run), model_group=module.mpu().get_model_parallel_group())
        module.optimizer = self._engine.optimizer

    def begin_step(
        self,
        step: StepBatch,
        *,
        lr: float,
        limits: UpdateLimits = NO_LIMITS,
        after: PendingStep | None = None,  # noqa: ARG002
        host_values: HostValues = no_host_values,
    ) -> FinishedStep:
        """Implements `Engine.begin_step`."""
        engine = self._engine
        # DeepSpeed divides the loss by the number of micro-batches in its config
        factor = self._begin(step, lr, limits) * engine.gradient_accumulation_steps()
        batches = [micro.to(self._device) for micro in step.micro_batches]
        self._learn_shapes(batches[0])
        self._stage_module.begin(batches, self._objective, factor)
        engine.module.train()
        engine.total_loss, engine._compute_loss = None, True
        engine.set_dataiterator(_pairs(batches))
        engine._exec_schedule(_WithoutStep(len(batches), engine.num_stages, engine.stage_id))
        means = self._means(self._stage_module.sums, step, host_values)
        engine._exec_optimizer_step()
        return self._result(step, means)

    def _scores(self, batches: Iterable[MicroBatch], objective: Objective) -> Iterator[tuple[Tensor, list[MicroBatch]]]:
        for part in self._by_shape(batches):
            self._learn_shapes(part[0])
            self._engine.reset_activation_shape()  # the shape may differ from that of earlier batches
            self._stage_module.begin(part, objective, 1.0)
            self._engine.eval_batch(
                _pairs(part), compute_loss=False, reduce_output=None, bcast_loss=False, num_micro_batches=len(part)
            )
            yield self._stage_module.sums[0], part
        self._engine.reset_activation_shape()

    @torch.no_grad()
    def _learn_shapes(self, batch: MicroBatch) -> None:
        """Runs a forward pass through the stages if the shapes of messages for this shape of ids are not known."""
        decoder, ids = self._local_model.decoder, batch.input_ids
        message, own = decoder.message, self._mesh.coordinates["pp"]
        if message is None or ids.shape in self._known:
            return
        group = self._mesh.group("pp")
        assert group is not None
        ranks, inputs = dist.get_process_group_ranks(group), ids
        if not decoder.layout.first:
            receive_shapes(message, ids.shape, source=ranks[own - 1], group=group, device=self._device)
            inputs = torch.zeros(message.size(ids.shape), dtype=decoder.layout.dtype, device=self._device)
        if not decoder.layout.last:
            training = decoder.training
            with eager(compiled=compiles(self._run.config.compile)):
                decoder.eval()(inputs, batch, self._objective)
            decoder.train(training)
            send_shapes(message, to=ranks[own + 1], group=group, device=self._device)
        self._known.add(ids.shape)

    def _by_shape(self, batches: Iterable[MicroBatch]) -> Iterator[list[MicroBatch]]:
        """Groups the batches by shape, since a schedule supports one shape."""
        for _, alike in groupby(batches, key=lambda micro: micro.input_ids.shape):
            while part := [micro.to(self._device) for micro in islice(alike, _EVALUATION_MICRO_BATCHES)]:
                yield part


def _pairs(batches: Sequence[MicroBatch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Makes DeepSpeed's data iterator: ids for the first stage; labels, which our last stage does not use."""
    return iter([(batch.input_ids, batch.labels) for batch in batches])


class _WithoutStep(TrainSchedule):  # type: ignore[misc]
    """DeepSpeed's 1F1B schedule without the optimizer step, which follows when every rank knows the loss."""

    def steps(self) -> Iterator[list[Any]]:
        """Yields the instructions of every clock tick of the schedule."""
        for commands in super().steps():
            yield [command for command in commands if not isinstance(command, OptimizerStep)]


class _MicroBatchStage(nn.Module):
    """One pipeline stage, which uses a step's micro-batches in the order of its forward passes.

    Args:
        decoder: the stage's decoder.
        device: this rank's device.

    Attributes:
        sums: sums of the loss and its parts over the micro-batches so far; zeros except on the last stage.
    """

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        super().__init__()
        self.decoder, self._device = decoder, device

    def begin(self, batches: Sequence[MicroBatch], objective: Objective, factor: float) -> None:
        """Sets the micro-batches of the next forward passes, and the factor on the output loss."""
        self._micro_batches, self._objective, self._factor = iter(batches), objective, factor
        self.sums = torch.zeros(1 + len(objective.parts), device=self._device)

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes hidden states, or on the last stage the scalar loss, from ids [B, T] or hidden states."""
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
        index: this stage's index.
        tied_group: the two ranks with copies of tied weights; None if this rank has no copy.

    Attributes:
        optimizer: DeepSpeed's optimizer, through which gradients are read; set once it exists.
    """

    optimizer: Any = None

    def __init__(
        self,
        topology: Topology,
        own: _MicroBatchStage,
        local_model: LocalModel,
        *,
        index: int,
        tied_group: dist.ProcessGroup | None,
    ) -> None:
        axes = PipeModelDataParallelTopology(num_pp=topology.pp, num_mp=topology.tp, num_dp=topology.dp * topology.cp)
        layers = [own if stage == index else LayerSpec(nn.Identity) for stage in range(topology.pp)]
        with redirect_stdout(StringIO()):  # DeepSpeed prints the layers
            super().__init__(layers, topology=axes, partition_method="uniform")
        self._local_model = local_model
        self._tied_group = tied_group
        named = local_model.decoder.parameters_by_name()
        for name in local_model.tied if index > 0 else ():
            named[name].ds_pipe_replicated = True  # type: ignore[attr-defined]  # the first stage counts its gradient

    def get_tied_weights_and_groups(self) -> list[Any]:
        """All-reduces the gradients of tied weights when DeepSpeed would do so; returns no work for DeepSpeed.

        DeepSpeed's own code reads `grad`, which is None if gradients are accumulated separately, in fp32.
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
        found = next((gradient for gradient in candidates if gradient is not None), None)
        if found is None and weight.requires_grad:  # only the other stage uses it
            found = weight.grad = torch.zeros_like(weight)
        return found
