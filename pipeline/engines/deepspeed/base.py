"""Base class of the DeepSpeed engines: loss scaling, the limits of updates, step results and the checkpointed state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shard_table import State
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.micro_batch import StepBatch
from pipeline.engines.base import NO_LIMITS, FinishedStep, HostValues, Replica, StepOutcome, UpdateLimits
from pipeline.engines.common import with_measures
from pipeline.engines.deepspeed.experts import ExpertMarker
from pipeline.engines.deepspeed.groups import ModelParallelUnit
from pipeline.engines.deepspeed.operators import set_up_deepspeed
from pipeline.engines.deepspeed.optimizer import make_optimizer
from pipeline.engines.deepspeed.replicated import ReplicatedOptimizer
from pipeline.engines.deepspeed.state import (
    collect_local_state,
    held_shards,
    replicas,
    reset_optimizer_state,
    restore_local_state,
    wrapped,
)
from pipeline.engines.engine_base import EngineBase, NamedState
from pipeline.engines.optim.groups import set_learning_rate
from pipeline.engines.optim.weight_ema import attach_ema
from pipeline.engines.parallel.assemble import LocalModel
from pipeline.models.construction.initial_values import ParameterValues
from pipeline.runtime.launch.errors_on_all_ranks import raise_on_all_ranks
from pipeline.runtime.launch.host_copy import to_device


class DeepSpeedBase(EngineBase):
    """State and helpers of a DeepSpeed engine. The process group must be initialized."""

    _engine: Any
    _local_model: LocalModel
    _loss = math.nan
    _host_sums: Sequence[float] = ()
    _limits = NO_LIMITS
    _outcome: StepOutcome | None = StepOutcome.APPLIED
    """Outcome of the current step; None until it is decided."""

    def _build(self, run: ResolvedRun, model: nn.Module, values: ParameterValues) -> None:  # noqa: ARG002
        set_up_deepspeed()  # zero.Init would not take over the process group
        deepspeed.utils.groups.mpu = None  # a global that may have the groups of an earlier engine
        self.deferred = False  # ZeRO's optimizers read the norm on the host

    def _initialize(
        self,
        run: ResolvedRun,
        module: nn.Module,
        *,
        config: dict[str, Any],
        model_group: dist.ProcessGroup | None,
        unit: ModelParallelUnit | None = None,
    ) -> None:
        """Sets `_engine` for a module around `_local_model`; see `make_optimizer`."""
        optimizer = make_optimizer(
            run,
            self._local_model,
            self._update_scales,
            model_group=model_group,
            expert_group=self._mesh.group("ep") if self._mesh else None,
            counts_unsharded=self._mesh is None or self._mesh.coordinates["tp"] == 0,
            update_allowed=self._update_allowed,
        )
        if self._local_model.experts:
            module.add_module("expert_marker", ExpertMarker())
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, mpu=unit)
        reset_optimizer_state(self._engine.optimizer)
        if run.config.run.ema is not None:
            attach_ema(wrapped(self._engine.optimizer), run.config.run.ema)
            self._local_state()  # creates the averages, before the first update
        if self._matrices:
            bound: Any = wrapped(self._engine.optimizer)
            held = held_shards(self._engine.optimizer, self._local_model, self._matrices)
            bound.bind_matrices(held, self._mesh.stage_group() if self._mesh else None)
            if self._qk_clip is not None:
                clipped = held_shards(self._engine.optimizer, self._local_model, self._qk_clip.rows)
                bound.bind_clip(self._qk_clip, clipped)
        self.decoders = [self._local_model.decoder]

    def state(self) -> State:
        """Implements `Engine.state`. Raises on all ranks if one rank's disk fails, because writing is collective."""
        state: NamedState = {}
        failed: str | None = None
        try:
            state, _ = self._state()
        except (OSError, RuntimeError, AssertionError) as error:
            failed = str(error) or repr(error)
        raise_on_all_ranks(failed, "the optimizer state could not be read")
        if not self._local_model.decoder.layout.first:  # for tied weights, the first stage writes its copy
            for name in self._local_model.tied:
                for key in named_state.parameter_keys(name, self._kind_of(name)):
                    del state[key]
        return state

    def close(self) -> None:
        """Implements `Engine.close`. DeepSpeed 0.19.8 frees its engine at stages 1 and 2, and keeps that of stage 3."""
        optimizer, parameters = self._engine.optimizer, list(self._engine.module.parameters())
        self._engine.destroy()
        if self._engine.zero_optimization_stage() == 3:
            inner = getattr(optimizer, "optimizer", None)
            _empty([vars(optimizer), {} if inner is None else dict(inner.state), parameters])
            _empty([vars(parameter) for parameter in parameters])

    def _local_state(self) -> tuple[NamedState, Callable[[], None]]:
        local_state = collect_local_state(
            self._engine.optimizer, self._local_model, self._kind, matrices=self._matrices
        )
        return local_state.named, partial(restore_local_state, self._engine.optimizer, local_state, self._kind)

    def replicas(self) -> Iterator[Replica]:
        """Implements `Engine.replicas`."""
        return replicas(self._engine.optimizer, self._local_model, self._mesh, self._tied_group)

    def _begin(self, step: StepBatch, lr: float, limits: UpdateLimits) -> float:
        """Sets learning rate, limits and loss scale; returns the factor on a summed loss before its backward pass.

        DeepSpeed averages gradients over the data ranks. Multiplied by the number of data ranks, this is the sum;
        targets are counted over all of them. In fp16 the loss scale is divided by that number, so that gradients are as
        large as on one process and overflow in the same steps.
        """
        optimizer, ranks = self._engine.optimizer, self._mesh.size("data") if self._mesh else 1
        self._loss, self._limits, self._outcome = math.nan, limits, None
        set_learning_rate(optimizer, lr)
        if self._qk_clip is not None:
            self._qk_clip.begin_step()
        if self._balancer is not None:  # the factor on a summed loss, times the scale that DeepSpeed applies
            self._balancer.begin_step((self._scaler.value if self._scaler.enabled else ranks) / step.targets)
        if not self._scaler.enabled:
            return ranks / step.targets
        if isinstance(optimizer, ReplicatedOptimizer):
            optimizer.scale = self._scaler.value / ranks
            return self._scaler.value / step.targets
        optimizer.override_loss_scale(self._scaler.value / ranks)  # `backward` multiplies the loss by it
        return ranks / step.targets

    def _result(self, step: StepBatch, means: list[float]) -> FinishedStep:
        """Returns the result of the step; lowers the loss scale after an overflow.

        If DeepSpeed itself skipped the update because of a non-finite norm, it has not called `_update_allowed`.
        """
        self._update_allowed()
        assert self._outcome is not None
        names, host = self._objective.parts, self._host_sums
        result = self._scaler.result(step.step, means, names, self._norm(), self._outcome, host_sums=host)
        return FinishedStep(with_measures(self._measures, result, targets=step.targets))

    def _update_allowed(self) -> bool:
        """Whether weights and optimizer states may be updated; called by the wrapped optimizer.

        DeepSpeed's optimizers know the norm by then, and call once per flat tensor: the first decision is kept.
        """
        if self._outcome is None:
            self._outcome = self._scaler.outcome(self._loss, self._norm(), self._limits)
        return self._outcome is StepOutcome.APPLIED

    def _norm(self) -> float:
        """Returns the global gradient norm; for a non-finite norm DeepSpeed reports None, infinity or -1."""
        reported = self._engine.optimizer._global_grad_norm
        norm = math.inf if reported is None else float(reported)
        return norm if norm >= 0 else math.inf

    def _means(self, sums: Tensor, step: StepBatch, host_values: HostValues) -> list[float]:
        """Turns sums over this rank's micro-batches into means over the targets of the step, before its update."""
        if self._qk_clip is not None:
            self._qk_clip.reduce()
        own = sums.double() if self._reports_loss else torch.zeros_like(sums, dtype=torch.float64)
        reduced = torch.cat([own, to_device(host_values(), own.device)])
        dist.all_reduce(reduced)
        values: list[float] = reduced.tolist()
        means, self._host_sums = [each / step.targets for each in values[: len(own)]], values[len(own) :]
        self._loss = means[0]
        return means


def _empty(value: Any) -> None:
    """Frees the memory of all tensors in nested lists and dicts."""
    if isinstance(value, Tensor):
        value.data = value.new_empty(0)
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            _empty(each)
