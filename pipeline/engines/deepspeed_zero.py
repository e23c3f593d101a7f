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
from pipeline.engines.objective import cross_entropy_sum
from pipeline.models.materialise import materialise
from pipeline.models.values import ParameterValues


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
        place = _shard_at_once(config) if run.config.zero_optimization.stage == 3 else lambda _parameter: None
        materialise(model, values, device=device, place=place)
        groups = decay_groups(dict(model.named_parameters()), decays, weight_decay=params.weight_decay)
        optimizer = make_adamw(groups, params, fused=device.type == "cuda")
        self._engine: Any
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        reset_moments(self._engine.optimizer)
        self._engine.train()

    def train_step(self, step: StepBatch, *, lr: float) -> StepResult:
        """See `Engine.train_step`."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        sums: dict[str, Tensor] = {}
        for number, micro in enumerate(step.micro_batches):
            batch = micro.to(self._device)
            loss = self._objective(self._engine(input_ids=batch.input_ids, use_cache=False).logits, batch)
            for name, value in {"loss": loss.total.detach(), **loss.parts}.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
            # DeepSpeed averages gradients over the ranks; times dp that is the sum, and targets are counted over all
            self._engine.backward(loss.total * (self._dp / step.targets), scale_wrt_gas=False)
            if number == len(step.micro_batches) - 1:
                means = self._means(sums, step.targets)
                refuse_non_finite(step.step, "loss", means["loss"])
            self._engine.step()
        norm = _norm(self._engine.get_global_grad_norm())
        refuse_non_finite(step.step, "gradient norm", norm)
        return StepResult(means.pop("loss"), means, norm)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Sums:
        """See `Engine.evaluate`."""
        self._engine.eval()
        nats, targets = torch.zeros((), device=self._device), torch.zeros((), device=self._device, dtype=torch.int64)
        for micro in batches:
            batch = micro.to(self._device)
            logits = self._engine(input_ids=batch.input_ids, use_cache=False).logits
            nats += cross_entropy_sum(logits, batch.labels)
            targets += (batch.labels != IGNORE).sum()
        dist.all_reduce(nats)
        dist.all_reduce(targets)
        self._engine.train()
        return Sums(float(nats), int(targets))

    def save(self, directory: Path) -> None:
        """See `Engine.save`."""
        named_state.write(named_shards(self._engine.optimizer, self._engine.module), directory)

    def load(self, directory: Path) -> None:
        """See `Engine.load`."""
        zero = self._engine.optimizer
        state = named_shards(zero, self._engine.module)
        named_state.read(state, directory)
        step = state[named_state.OPTIMIZER_STEP]
        assert isinstance(step, Tensor)
        set_step(zero, step)
        refresh_weights(zero)

    def _means(self, sums: dict[str, Tensor], targets: int) -> dict[str, float]:
        stacked = torch.stack(list(sums.values()))
        dist.all_reduce(stacked)
        return dict(zip(sums, (stacked.double() / targets).tolist(), strict=True))


def _norm(reported: Any) -> float:
    """DeepSpeed's gradient norm. When it skipped an update for an overflow it says None or -1, which is no norm."""
    norm = math.inf if reported is None else float(reported)
    return norm if norm >= 0 else math.inf


def _shard_at_once(config: dict[str, Any]) -> Any:
    """ZeRO-3: a parameter is cut up as soon as it has its value, so no rank ever holds the whole model."""

    def place(parameter: nn.Parameter) -> None:
        deepspeed.zero.Init(module=nn.ParameterList([parameter]), config_dict_or_path=config)

    return place
