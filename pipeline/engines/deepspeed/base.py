"""Base class of the DeepSpeed engines: loss scaling, the limits of updates, step results and the checkpointed state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shard_table import State
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.memory.shard_files import ShardFiles
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.loader import StepBatch
from pipeline.engines.base import (
    NO_LIMITS,
    EvaluationSums,
    FinishedStep,
    HostValues,
    Objective,
    Replica,
    StepOutcome,
    TrainsStepByStep,
    UpdateLimits,
)
from pipeline.engines.common import with_expert_load
from pipeline.engines.deepspeed.operators import set_up_deepspeed
from pipeline.engines.deepspeed.replicated import ReplicatedOptimizer
from pipeline.engines.deepspeed.state import LocalState, collect_local_state, replicas, restore_local_state
from pipeline.engines.loss_scale import LossScaler
from pipeline.engines.optim.groups import set_learning_rate
from pipeline.engines.parallel.assemble import LocalModel
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.expert_balance import make_balancer
from pipeline.engines.parallel.mesh import Mesh
from pipeline.runtime.launch.errors_on_all_ranks import raise_on_all_ranks
from pipeline.runtime.launch.host_copy import to_device


class DeepSpeedBase(TrainsStepByStep):
    """State and helpers of a DeepSpeed engine. The process group must be initialized.

    Args:
        run: the resolved config.
        model: the full model, on meta.
        objective: the loss.
        device: of this rank.
        mesh: this rank's coordinates and process groups; None for one process.
    """

    _engine: Any
    _local_model: LocalModel
    _tied_group: dist.ProcessGroup | None
    """First and last pipeline rank, which both hold a tied embedding; see `tied_weights_group`."""
    _loss: float
    _host_sums: list[float]
    _limits: UpdateLimits
    _outcome: StepOutcome | None
    """Of the current step; None until it is decided."""

    def __init__(
        self, run: ResolvedRun, model: nn.Module, objective: Objective, *, device: torch.device, mesh: Mesh | None
    ) -> None:
        set_up_deepspeed()  # zero.Init would not take over the process group
        deepspeed.utils.groups.mpu = None  # a global, which may hold the groups of an engine built earlier
        self.rank, self.deferred = dist.get_rank(), False  # ZeRO's optimizers read the norm on the host
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._objective, self._device = objective, device
        self._kind, self._scaler = run.config.optimizer.kind, LossScaler(run.config.fp16)
        self._mesh, self._tied_group = mesh, None
        self._balancer = make_balancer(run.config.moe, model, device=device)
        self._loss, self._limits, self._outcome = math.nan, NO_LIMITS, StepOutcome.APPLIED
        self._host_sums = []
        coordinates = run.topology.coordinates(self.rank)
        # every tp rank of the last stage has the same loss; one of them counts
        self._reports_loss = coordinates["tp"] == 0 and coordinates["pp"] == run.topology.pp - 1

    def state(self) -> State:
        """See `Engine.state`."""
        state = self._state_or_raise_on_all()
        if not self._local_model.decoder.layout.first:  # of tied weights, the first stage writes its copy
            for name in self._local_model.tied:
                for key in named_state.parameter_keys(name, self._kind):
                    del state[key]
        return state

    def load(self, directory: Path, *, fresh_optimizer: bool = False, files: ShardFiles | None = None) -> None:
        """See `Engine.load`."""
        with self.edit_state() as state:
            named_state.read(state, directory, fresh_optimizer=fresh_optimizer, files=files)

    @contextmanager
    def edit_state(self) -> Iterator[State]:
        """See `Engine.edit_state`."""
        local_state = self._local_state()
        yield local_state.named
        self._scaler.load_state_dict(local_state.named)
        if self._balancer is not None:
            self._balancer.load_state_dict(local_state.named)
        restore_local_state(self._engine.optimizer, local_state, self._kind)

    def _state_or_raise_on_all(self) -> dict[str, NamedShard | Tensor]:
        """The named state; raises on all ranks if one rank's disk fails, because writing is collective."""
        state: dict[str, NamedShard | Tensor] = {}
        failed: str | None = None
        try:
            state = self._named_state()
        except (OSError, RuntimeError, AssertionError) as error:
            failed = str(error) or repr(error)
        raise_on_all_ranks(failed, "the optimizer state could not be read")
        return state

    def _named_state(self) -> dict[str, NamedShard | Tensor]:
        return self._local_state().named

    def _local_state(self) -> LocalState:
        local_state = collect_local_state(self._engine.optimizer, self._local_model, self._kind)
        local_state.named.update(self._scaler.state_dict())
        if self._balancer is not None:
            local_state.named.update(self._balancer.state_dict())
        local_state.named.update(named_state.buffer_state(self._local_model.decoder.causal))
        return local_state

    @property
    def decoders(self) -> list[Decoder]:
        """See `Engine.decoders`."""
        return [self._local_model.decoder]

    def replicas(self) -> Iterator[Replica]:
        """See `Engine.replicas`."""
        return replicas(self._engine.optimizer, self._local_model, self._mesh, self._tied_group)

    def _begin(self, step: StepBatch, lr: float, limits: UpdateLimits) -> float:
        """Sets learning rate, limits and loss scale; returns the factor on a summed loss before its backward pass.

        DeepSpeed averages gradients over the data ranks; multiplied by their number that is the sum, and targets are
        counted over all of them. In fp16 the loss scale is divided by that number, so that gradients are as large as on
        one process and overflow in the same steps.
        """
        optimizer, ranks = self._engine.optimizer, self._mesh.size("data") if self._mesh else 1
        self._loss, self._limits, self._outcome = math.nan, limits, None
        set_learning_rate(optimizer, lr)
        if self._balancer is not None:  # the factor on a summed loss, and the scale that DeepSpeed applies on top of it
            self._balancer.begin_step((self._scaler.value if self._scaler.enabled else ranks) / step.targets)
        if not self._scaler.enabled:
            return ranks / step.targets
        if isinstance(optimizer, ReplicatedOptimizer):
            optimizer.scale = self._scaler.value / ranks
            return self._scaler.value / step.targets
        optimizer.override_loss_scale(self._scaler.value / ranks)  # DeepSpeed multiplies the loss by it, in `backward`
        return ranks / step.targets

    def _result(self, step: StepBatch, means: list[float]) -> FinishedStep:
        """The result of the step; lowers the loss scale after an overflow.

        Where DeepSpeed skipped the update itself, because the norm is not finite, it has not asked yet.
        """
        self._update_allowed()
        assert self._outcome is not None
        names, host = self._objective.parts, self._host_sums
        result = self._scaler.result(step.step, means, names, self._norm(), self._outcome, host_sums=host)
        return FinishedStep(with_expert_load(self._balancer, result, targets=step.targets))

    def _update_allowed(self) -> bool:
        """Whether weights and optimizer states may be updated; called by the wrapped optimizer.

        DeepSpeed's optimizers know the norm by then, and call once per flat tensor: the first decision is kept.
        """
        if self._outcome is None:
            self._outcome = self._scaler.outcome(self._loss, self._norm(), self._limits)
        return self._outcome is StepOutcome.APPLIED

    def _norm(self) -> float:
        """The global gradient norm. DeepSpeed reports None, infinity or -1 when it skipped an update for it."""
        reported = self._engine.optimizer._global_grad_norm
        norm = math.inf if reported is None else float(reported)
        return norm if norm >= 0 else math.inf

    def _means(self, sums: Tensor, step: StepBatch, host_values: HostValues) -> list[float]:
        """Sums over this rank's micro-batches -> means over the targets of the step, before its update."""
        own = sums.double() if self._reports_loss else torch.zeros_like(sums, dtype=torch.float64)
        reduced = torch.cat([own, to_device(host_values(), own.device)])
        dist.all_reduce(reduced)
        values: list[float] = reduced.tolist()
        means, self._host_sums = [each / step.targets for each in values[: len(own)]], values[len(own) :]
        self._loss = means[0]
        return means

    def _evaluation_sums(self, nats: Tensor, targets: int) -> EvaluationSums:
        both = self._all_reduce_sums(torch.stack([nats.double(), torch.tensor(targets, device=nats.device).double()]))
        return EvaluationSums(float(both[0]), int(both[1]))

    def _all_reduce_sums(self, sums: Tensor) -> Tensor:
        own = sums if self._reports_loss else torch.zeros_like(sums)
        dist.all_reduce(own)
        return own
