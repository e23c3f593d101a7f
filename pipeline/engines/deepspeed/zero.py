"""DeepSpeed engine without pipeline parallelism: ZeRO stages 0 to 3 with data, context and tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.config.rules.resolve import ResolvedRun
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
from pipeline.engines.deepspeed.groups import ModelParallelUnit
from pipeline.engines.deepspeed.local_model import Zero3, build_local_model
from pipeline.engines.parallel.activation_checkpointing import not_restored
from pipeline.engines.parallel.compilation import compiles
from pipeline.engines.parallel.conditional_modules import conditional_blocks
from pipeline.models.construction.initial_values import ParameterValues


class DeepSpeedZero(DeepSpeedBase):
    """One model, sharded over its data ranks by ZeRO."""

    def _build(self, run: ResolvedRun, model: nn.Module, values: ParameterValues) -> None:
        super()._build(run, model, values)
        mesh = self._mesh
        config = deepspeed_config(run)
        unit = ModelParallelUnit(mesh) if mesh and mesh.size("tp") > 1 else None
        zero3 = Zero3(config, unit) if run.config.zero_optimization.stage == 3 else None
        self._local_model = build_local_model(
            run, model, values, mesh, device=self._device, balancer=self._balancer, zero3=zero3
        )
        if zero3 is not None:
            blocks = conditional_blocks(model.config)
            if compiles(run.config.compile):
                # hooks outside a layer's compiled graph gather its weights at once
                blocks = [*blocks, GradientCheckpointingLayer]
            set_z3_leaf_modules(self._local_model.decoder, blocks, raise_if_not_found=False)
        tp_group = mesh.group("tp") if mesh else None
        self._initialize(run, self._local_model.decoder, config=config, model_group=tp_group, unit=unit)
        if zero3 is not None:
            _gather_in_recomputations(self._engine.optimizer.parameter_offload)
        # DeepSpeed would count the micro-batches of its config, but ranks with different shares, and the steps of a
        # batch ramp, run different numbers
        self._uneven = run.batch.shares is not None or run.ramps

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

    def _score(self, batch: MicroBatch, objective: Objective) -> Tensor:
        total: Tensor = self._engine(batch.input_ids, batch, objective)[0]
        return total


def _gather_in_recomputations(offload: Any) -> None:
    """Hides the operators of ZeRO-3's hooks within a layer from selective activation checkpointing.

    A recomputation gathers weights that were still present in the forward pass, so torch has no saved results.
    """
    for name in ("pre_sub_module_forward_function", "post_sub_module_forward_function"):
        setattr(offload, name, partial(_run_not_restored, getattr(offload, name)))


def _run_not_restored(hook: Callable[[nn.Module], None], module: nn.Module) -> None:
    with not_restored():
        hook(module)
