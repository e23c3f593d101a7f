"""DeepSpeed's ZeRO behind the `Engine` protocol: stages 1, 2 and 3, fp32 or bf16."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.config.rules import ResolvedRun
from pipeline.data.loader import IGNORE, MicroBatch, StepBatch
from pipeline.engines.base import Objective, StepResult, Sums
from pipeline.engines.common import decay_groups, decayed_names, make_adamw, refuse_non_finite
from pipeline.engines.deepspeed_config import deepspeed_config
from pipeline.engines.deepspeed_state import named_shards, refresh_weights, reset_moments, set_step
from pipeline.engines.objective import CrossEntropy
from pipeline.models.materialise import materialise
from pipeline.models.values import ParameterValues
from pipeline.parallel.assemble import assemble


class DeepSpeedZero:
    """One model, sharded over all ranks by ZeRO. The process group is open.

    Args:
        run: the resolved config.
        model: on meta, as `build_meta` made it.
        values: first values of its parameters.
        objective: what is minimised.
        device: of this rank.
    """

    def __init__(
        self, run: ResolvedRun, model: nn.Module, values: ParameterValues, objective: Objective, *, device: torch.device
    ) -> None:
        params = run.config.optimizer.params
        config = deepspeed_config(run)
        deepspeed.init_distributed()  # takes over the open process group; zero.Init would not
        self.rank = dist.get_rank()
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._objective, self._device, self._dp = objective, device, run.topology.dp
        decays = decayed_names(model)
        self._decoder = assemble(run, model, None).decoder
        place = _shard_at_once(config) if run.config.zero_optimization.stage == 3 else lambda _parameter: None
        materialise(self._decoder.causal, values, device=device, place=place)
        groups = decay_groups(self._decoder.named(), decays, weight_decay=params.weight_decay)
        optimizer = make_adamw(groups, params, fused=device.type == "cuda")
        self._engine: Any
        self._engine, *_ = deepspeed.initialize(model=self._decoder, optimizer=optimizer, config=config)
        reset_moments(self._engine.optimizer)
        self._engine.train()

    def train_step(self, step: StepBatch, *, lr: float) -> StepResult:
        """See `Engine.train_step`."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        sums = torch.zeros(1 + len(self._objective.parts), device=self._device)
        for number, micro in enumerate(step.micro_batches):
            batch = micro.to(self._device)
            total, *parts = self._engine(batch.input_ids, batch, self._objective)
            sums += torch.stack([total.detach(), *parts])
            # DeepSpeed averages gradients over the ranks; times dp that is the sum, and targets are counted over all
            self._engine.backward(total * (self._dp / step.targets), scale_wrt_gas=False)
            if number == len(step.micro_batches) - 1:
                loss, *means = self._means(sums, step.targets)
                refuse_non_finite(step.step, "loss", loss)
            self._engine.step()
        norm = _norm(self._engine.get_global_grad_norm())
        refuse_non_finite(step.step, "gradient norm", norm)
        return StepResult(loss, dict(zip(self._objective.parts, means, strict=True)), norm)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Sums:
        """See `Engine.evaluate`."""
        self._engine.eval()
        scoring = CrossEntropy()
        nats, targets = torch.zeros((), device=self._device), torch.zeros((), device=self._device, dtype=torch.int64)
        for micro in batches:
            batch = micro.to(self._device)
            nats += self._engine(batch.input_ids, batch, scoring)[0]
            targets += (batch.labels != IGNORE).sum()
        dist.all_reduce(nats)
        dist.all_reduce(targets)
        self._engine.train()
        return Sums(float(nats), int(targets))

    def save(self, directory: Path) -> None:
        """See `Engine.save`."""
        named_state.write(named_shards(self._engine.optimizer, self._decoder.named()), directory)

    def load(self, directory: Path) -> None:
        """See `Engine.load`."""
        zero = self._engine.optimizer
        state = named_shards(zero, self._decoder.named())
        named_state.read(state, directory)
        step = state[named_state.OPTIMIZER_STEP]
        assert isinstance(step, Tensor)
        set_step(zero, step)
        refresh_weights(zero)

    def _means(self, sums: Tensor, targets: int) -> list[float]:
        dist.all_reduce(sums)
        means: list[float] = (sums.double() / targets).tolist()
        return means


def _norm(reported: Any) -> float:
    """DeepSpeed's gradient norm. When it skipped an update for an overflow it says None or -1, which is no norm."""
    norm = math.inf if reported is None else float(reported)
    return norm if norm >= 0 else math.inf


def _shard_at_once(config: dict[str, Any]) -> Any:
    """ZeRO-3: a parameter is cut up as soon as it has its value, so no rank ever holds the whole model."""

    def place(parameter: nn.Parameter) -> None:
        deepspeed.zero.Init(module=nn.ParameterList([parameter]), config_dict_or_path=config)

    return place
