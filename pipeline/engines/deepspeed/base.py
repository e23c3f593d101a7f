"""What DeepSpeed with and without a pipeline have in common: places, scales, results and the saved state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint import named_state
from pipeline.checkpoint.plan import State
from pipeline.checkpoint.shards import NamedShard
from pipeline.checkpoint.store import raise_together
from pipeline.config.rules import ResolvedRun
from pipeline.data.loader import StepBatch
from pipeline.engines.base import Gate, Objective, Replica, StepOutcome, StepResult, Sums, always
from pipeline.engines.common import MOMENTS
from pipeline.engines.deepspeed.operators import set_up_deepspeed
from pipeline.engines.deepspeed.replicated import Replicated
from pipeline.engines.deepspeed.state import LocalState, collect_local_state, replicas, restore_local_state
from pipeline.engines.loss_scale import LossScale
from pipeline.parallel.assemble import Assembled
from pipeline.parallel.mesh import Mesh


class DeepSpeedBase:
    """State and helpers of a DeepSpeed engine. The process group is open.

    Args:
        run: the resolved config.
        objective: what is minimised.
        device: of this rank.
        mesh: this rank's place and groups; None for one process.
    """

    _engine: Any
    _assembled: Assembled
    _ends: dist.ProcessGroup | None
    """The ranks that hold a parameter with this one, being the two ends of a pipeline."""
    _loss: float
    _allow: Gate
    _outcome: StepOutcome | None
    """Of the step under way; None until it is decided."""

    def __init__(self, run: ResolvedRun, objective: Objective, *, device: torch.device, mesh: Mesh | None) -> None:
        set_up_deepspeed()  # zero.Init would not take over the process group
        deepspeed.utils.groups.mpu = None  # a global: the groups of an engine made before stay there
        self.rank = dist.get_rank()
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._objective, self._device = objective, device
        self._scale = LossScale(run.config.fp16)
        self._mesh, self._ends = mesh, None
        self._loss, self._allow, self._outcome = math.nan, always, StepOutcome.APPLIED
        place = run.topology.coordinates(self.rank)
        # every tp rank of the last stage has the same loss; one of them counts
        self._brings_sums = place["tp"] == 0 and place["pp"] == run.topology.pp - 1

    def state(self) -> State:
        """See `Engine.state`."""
        state = self._state_of_all()
        if not self._assembled.decoder.form.first:  # the first stage writes what two stages hold
            for name in self._assembled.shared:
                for key in (named_state.weight_key(name), *(named_state.moment_key(m, name) for m in MOMENTS)):
                    del state[key]
        return state

    def load(self, directory: Path) -> None:
        """See `Engine.load`."""
        held = self._held()
        named_state.read(held.named, directory)
        self._scale.take_up(held.named)
        restore_local_state(self._engine.optimizer, held)

    def _state_of_all(self) -> dict[str, NamedShard | Tensor]:
        """The named state, once all ranks have it: a disk may fail on one of them, and writing is collective."""
        state: dict[str, NamedShard | Tensor] = {}
        failed: str | None = None
        try:
            state = self._named_state()
        except (OSError, RuntimeError, AssertionError) as error:
            failed = str(error) or repr(error)
        raise_together(failed, "the state could not be fetched")
        return state

    def _named_state(self) -> dict[str, NamedShard | Tensor]:
        return self._held().named

    def _held(self) -> LocalState:
        held = collect_local_state(self._engine.optimizer, self._assembled)
        held.named.update(self._scale.named())
        return held

    def replicas(self) -> Iterator[Replica]:
        """See `Engine.replicas`."""
        return replicas(self._engine.optimizer, self._assembled, self._mesh, self._ends)

    def _begin(self, step: StepBatch, lr: float, allow: Gate) -> float:
        """Sets rate, gate and loss scale; returns what a sum over targets is multiplied by before its backward pass.

        DeepSpeed averages gradients over the data ranks. Times their number that is the sum, and targets are counted
        over all of them. In fp16 that number is taken off the loss scale, so that gradients are as large as on one
        process and overflow when its would.
        """
        zero, ranks = self._engine.optimizer, self._mesh.size("data") if self._mesh else 1
        self._loss, self._allow, self._outcome = math.nan, allow, None
        for group in zero.param_groups:
            group["lr"] = lr
        if not self._scale.enabled:
            return ranks / step.targets
        if isinstance(zero, Replicated):
            zero.scale = self._scale.value / ranks
            return self._scale.value / step.targets
        zero.override_loss_scale(self._scale.value / ranks)  # DeepSpeed multiplies the loss by it, in `backward`
        return ranks / step.targets

    def _result(self, step: StepBatch, means: list[float]) -> StepResult:
        """What the optimizer did; lowers the loss scale after an overflow.

        Where DeepSpeed left the update out by itself, because the norm is not finite, the gate has not been asked yet.
        """
        self._permits()
        assert self._outcome is not None
        return self._scale.result(step.step, means, self._objective.parts, self._norm(), self._outcome)

    def _permits(self) -> bool:
        """Whether weights and moments may be updated; what the wrapped optimizer asks.

        DeepSpeed's optimizers know the norm by then, and ask once per flat tensor: the first answer stands.
        """
        if self._outcome is None:
            self._outcome = self._scale.outcome(self._loss, self._norm(), self._allow)
        return self._outcome is StepOutcome.APPLIED

    def _norm(self) -> float:
        """Of the gradient. When DeepSpeed left an update out for it, it says None, infinity or -1."""
        reported = self._engine.optimizer._global_grad_norm
        norm = math.inf if reported is None else float(reported)
        return norm if norm >= 0 else math.inf

    def _means(self, sums: Tensor, step: StepBatch) -> list[float]:
        """Sums of one rank's micro-batches -> means over the targets of the step, before its update."""
        means: list[float] = (self._over_all(sums).double() / step.targets).tolist()
        self._loss = means[0]
        return means

    def _evaluated(self, nats: Tensor, targets: int) -> Sums:
        both = self._over_all(torch.stack([nats.double(), torch.tensor(targets, device=nats.device).double()]))
        return Sums(float(both[0]), int(both[1]))

    def _over_all(self, sums: Tensor) -> Tensor:
        own = sums if self._brings_sums else torch.zeros_like(sums)
        dist.all_reduce(own)
        return own
