"""The reference engine: one plain PyTorch process, short enough to read. All layouts are compared with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.checkpoint.plan import State
from pipeline.checkpoint.shards import NamedShard
from pipeline.config.rules import ResolvedRun
from pipeline.data.loader import IGNORE, MicroBatch, StepBatch
from pipeline.engines.base import EvaluationSums, Objective, Replica, StepOutcome, StepResult, UpdateGate, always_update
from pipeline.engines.common import (
    MOMENTS,
    decayed_names,
    ensure_adamw_state,
    make_adamw,
    master_weight,
    weight_decay_groups,
)
from pipeline.engines.loss_scale import LossScaler
from pipeline.engines.objective import CrossEntropy
from pipeline.models.materialise import materialise
from pipeline.models.values import ParameterValues
from pipeline.parallel.assemble import assemble


class TorchReference:
    """One process, one device, no sharding.

    With bf16 or fp16 the model's weights have that dtype; the optimizer updates fp32 master weights, and gradients are
    accumulated over micro-batches in fp32. fp16 uses loss scaling (`LossScaler`).

    Args:
        run: the resolved config.
        model: on meta, as `build_meta` made it.
        values: initial values of its parameters.
        objective: the loss.
        device: where model and optimizer are placed.
    """

    def __init__(
        self, run: ResolvedRun, model: nn.Module, values: ParameterValues, objective: Objective, *, device: torch.device
    ) -> None:
        params = run.config.optimizer.params
        self.rank = 0
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._objective, self._device = objective, device
        self._clip, self._scaler = run.config.gradient_clipping, LossScaler(run.config.fp16)
        self._decoder = assemble(run, model, None).decoder
        materialise(self._decoder.causal, values, device=device)
        self._decoder.train()
        self._weights = self._decoder.parameters_by_name()
        self._masters = {name: master_weight(weight) for name, weight in self._weights.items()}
        groups = weight_decay_groups(self._masters, decayed_names(model), weight_decay=params.weight_decay)
        self._optimizer = make_adamw(groups, params)

    def train_step(self, step: StepBatch, *, lr: float, update_gate: UpdateGate = always_update) -> StepResult:
        """See `Engine.train_step`."""
        sums = torch.zeros(1 + len(self._objective.parts), device=self._device)
        for micro in step.micro_batches:
            batch = micro.to(self._device)
            total, *parts = self._decoder(batch.input_ids, batch, self._objective)
            (total * (self._scaler.value / step.targets)).backward()
            self._accumulate_gradients()
            sums += torch.stack([total.detach(), *parts])
        means: list[float] = (sums.double() / step.targets).tolist()
        norm = self._gradient_norm() / self._scaler.value
        outcome = self._scaler.outcome(means[0], norm, update_gate)
        if outcome is StepOutcome.APPLIED:
            self._update(norm, lr)
        self._optimizer.zero_grad(set_to_none=True)
        return self._scaler.result(step.step, means, self._objective.parts, norm, outcome)

    def replicas(self) -> Iterator[Replica]:
        """See `Engine.replicas`: one process has none."""
        return iter(())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> EvaluationSums:
        """See `Engine.evaluate`."""
        self._decoder.eval()
        nats, targets, objective = 0.0, 0, CrossEntropy()
        for micro in batches:
            batch = micro.to(self._device)
            nats += float(self._decoder(batch.input_ids, batch, objective)[0])
            targets += int((batch.labels != IGNORE).sum())
        self._decoder.train()
        return EvaluationSums(nats, targets)

    def state(self) -> State:
        """See `Engine.state`."""
        return self._named_state()

    def load(self, directory: Path) -> None:
        """See `Engine.load`."""
        state = self._named_state()
        named_state.read(state, directory)
        step = state[named_state.OPTIMIZER_STEP]
        assert isinstance(step, Tensor)
        self._scaler.load_state_dict(state)
        for name, master in self._masters.items():
            ensure_adamw_state(self._optimizer, master)["step"].copy_(step)
            self._weights[name].data.copy_(master.data)

    def _named_state(self) -> dict[str, NamedShard | Tensor]:
        named: dict[str, NamedShard | Tensor] = {}
        step = torch.zeros((), dtype=torch.float32)
        for name, master in self._masters.items():
            state, shape = ensure_adamw_state(self._optimizer, master), tuple(master.shape)
            named[named_state.weight_key(name)] = NamedShard(shape, start=0, values=master.data.view(-1))
            for moment in MOMENTS:
                named[named_state.moment_key(moment, name)] = NamedShard(shape, start=0, values=state[moment].view(-1))
            step = state["step"].detach().to("cpu", copy=True)
        return {**named, **self._scaler.state_dict(), named_state.OPTIMIZER_STEP: step}

    def _accumulate_gradients(self) -> None:
        for name, weight in self._weights.items():
            master = self._masters[name]
            if master is weight or weight.grad is None:
                continue
            gradient = weight.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            weight.grad = None

    def _gradient_norm(self) -> float:
        gradients = [m.grad for m in self._masters.values() if m.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    @torch.no_grad()
    def _update(self, norm: float, lr: float) -> None:
        factor = self._scaler.factor(norm, self._clip)
        for master in self._masters.values():
            if master.grad is not None and factor != 1.0:
                master.grad.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        for name, weight in self._weights.items():
            if self._masters[name] is not weight:
                weight.copy_(self._masters[name])
