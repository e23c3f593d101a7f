"""DeepSpeed engine without pipeline parallelism: ZeRO stages 0 to 3 with data, context and tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.config.rules.resolve import ResolvedRun
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
from pipeline.engines.deepspeed.groups import ModelParallelUnit
from pipeline.engines.deepspeed.local_model import Zero3, build_local_model
from pipeline.engines.deepspeed.optimizer import make_optimizer
from pipeline.engines.deepspeed.state import reset_optimizer_state
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.compilation import compiles
from pipeline.engines.parallel.conditional_modules import conditional_blocks
from pipeline.engines.parallel.mesh import Mesh
from pipeline.models.build.initial_values import ParameterValues


class DeepSpeedZero(DeepSpeedBase):
    """One model, sharded over its data ranks by ZeRO. The process group must be initialized.

    Args:
        run: the resolved config.
        model: on meta, as `build_meta` made it.
        values: initial values of its parameters.
        objective: the loss.
        device: of this rank.
        mesh: this rank's coordinates and process groups; None for one process.
    """

    def __init__(
        self,
        run: ResolvedRun,
        model: nn.Module,
        values: ParameterValues,
        objective: Objective,
        *,
        device: torch.device,
        mesh: Mesh | None,
    ) -> None:
        super().__init__(run, model, objective, device=device, mesh=mesh)
        scales = update_scales(model, run.config.model)
        config = deepspeed_config(run)
        unit = ModelParallelUnit(mesh) if mesh and mesh.size("tp") > 1 else None
        zero3 = Zero3(config, unit) if run.config.zero_optimization.stage == 3 else None
        self._local_model = build_local_model(
            run, model, values, mesh, device=device, balancer=self._balancer, zero3=zero3
        )
        optimizer = make_optimizer(
            run,
            self._local_model,
            scales,
            model_group=mesh.group("tp") if mesh else None,
            counts_unsharded=mesh is None or mesh.coordinates["tp"] == 0,
            update_allowed=self._update_allowed,
        )
        if zero3 is not None:
            blocks = conditional_blocks(model.config)
            if compiles(run.config.compile):
                # a layer's weights are gathered at once, by hooks outside its compiled graph
                blocks = [*blocks, GradientCheckpointingLayer]
            set_z3_leaf_modules(self._local_model.decoder, blocks, raise_if_not_found=False)
        self._engine, *_ = deepspeed.initialize(
            model=self._local_model.decoder, optimizer=optimizer, config=config, mpu=unit
        )
        reset_optimizer_state(self._engine.optimizer)
        self._engine.train()
        # DeepSpeed would count the micro-batches of its config, and ranks with other shares run other numbers of them
        self._uneven = run.batch.shares is not None

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
        factor, means = self._begin(step, lr, limits), []
        sums = torch.zeros(1 + len(self._objective.parts), device=self._device)
        for number, micro in enumerate(step.micro_batches):
            if self._uneven:
                self._engine.set_gradient_accumulation_boundary(number == len(step.micro_batches) - 1)
            batch = micro.to(self._device)
            total, *parts = self._engine(batch.input_ids, batch, self._objective)
            sums += torch.stack([total.detach(), *parts])
            self._engine.backward(total * factor, scale_wrt_gas=False)
            if number == len(step.micro_batches) - 1:
                means = self._means(sums, step, host_values)
            self._engine.step()
        return self._result(step, means)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> EvaluationSums:
        """See `Engine.evaluate`."""
        self._engine.eval()
        objective, nats, targets = CrossEntropy(), torch.zeros((), device=self._device), 0
        for micro in batches:
            batch = micro.to(self._device)
            nats += self._engine(batch.input_ids, batch, objective)[0]
            targets += int((micro.labels != IGNORE).sum())
        self._engine.train()
        return self._evaluation_sums(nats, targets)

    @torch.no_grad()
    def forward_passes(self, batches: Iterable[MicroBatch], objective: Objective) -> None:
        """See `Engine.forward_passes`."""
        self._engine.eval()
        for micro in batches:
            batch = micro.to(self._device)
            self._engine(batch.input_ids, batch, objective)
        self._engine.train()
