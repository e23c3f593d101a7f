"""DeepSpeed without a pipeline behind the `Engine` protocol: ZeRO 0 to 3, over any dp, cp and tp."""

from __future__ import annotations

from collections.abc import Iterable

import deepspeed
import torch
from torch import nn

from pipeline.config.rules import ResolvedRun
from pipeline.data.loader import IGNORE, MicroBatch, StepBatch
from pipeline.engines.base import Gate, Objective, StepResult, Sums, always
from pipeline.engines.common import decayed_names
from pipeline.engines.deepspeed.base import DeepSpeedBase
from pipeline.engines.deepspeed.config import deepspeed_config
from pipeline.engines.deepspeed.groups import ParallelUnit
from pipeline.engines.deepspeed.parts import make_optimizer, make_part, shard_at_once
from pipeline.engines.deepspeed.state import reset_moments
from pipeline.engines.objective import CrossEntropy
from pipeline.models.values import ParameterValues
from pipeline.parallel.mesh import Mesh


class DeepSpeedZero(DeepSpeedBase):
    """One model, sharded over its data ranks by ZeRO. The process group is open.

    Args:
        run: the resolved config.
        model: on meta, as `build_meta` made it.
        values: first values of its parameters.
        objective: what is minimised.
        device: of this rank.
        mesh: this rank's place and groups; None for one process.
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
        super().__init__(run, objective, device=device, mesh=mesh)
        config = deepspeed_config(run)
        unit = ParallelUnit(mesh) if mesh and mesh.size("tp") > 1 else None
        place = shard_at_once(config, unit) if run.config.zero_optimization.stage == 3 else None
        self._assembled = make_part(run, model, values, mesh, device=device, place=place)
        optimizer = make_optimizer(
            run,
            self._assembled,
            decayed_names(model),
            holders=mesh.group("tp") if mesh else None,
            counts_whole=mesh is None or mesh.place["tp"] == 0,
            permits=self._permits,
        )
        self._engine, *_ = deepspeed.initialize(
            model=self._assembled.decoder, optimizer=optimizer, config=config, mpu=unit
        )
        reset_moments(self._engine.optimizer)
        self._engine.train()

    def train_step(self, step: StepBatch, *, lr: float, allow: Gate = always) -> StepResult:
        """See `Engine.train_step`."""
        factor, means = self._begin(step, lr, allow), []
        sums = torch.zeros(1 + len(self._objective.parts), device=self._device)
        for number, micro in enumerate(step.micro_batches):
            batch = micro.to(self._device)
            total, *parts = self._engine(batch.input_ids, batch, self._objective)
            sums += torch.stack([total.detach(), *parts])
            self._engine.backward(total * factor, scale_wrt_gas=False)
            if number == len(step.micro_batches) - 1:
                means = self._means(sums, step)
            self._engine.step()
        return self._result(step, means)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Sums:
        """See `Engine.evaluate`."""
        self._engine.eval()
        scoring, nats, targets = CrossEntropy(), torch.zeros((), device=self._device), 0
        for micro in batches:
            batch = micro.to(self._device)
            nats += self._engine(batch.input_ids, batch, scoring)[0]
            targets += int((micro.labels != IGNORE).sum())
        self._engine.train()
        return self._evaluated(nats, targets)
