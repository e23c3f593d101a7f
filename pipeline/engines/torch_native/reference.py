"""The reference: one plain PyTorch process, in which every line can be read. All layouts are measured against it."""

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
from pipeline.engines.base import Gate, Objective, Replica, StepOutcome, StepResult, Sums, always
from pipeline.engines.common import (
    MOMENTS,
    decay_groups,
    decayed_names,
    ensure_state,
    make_adamw,
    master_of,
)
from pipeline.engines.loss_scale import LossScale
from pipeline.engines.objective import CrossEntropy
from pipeline.models.materialise import materialise
from pipeline.models.values import ParameterValues
from pipeline.parallel.assemble import assemble


class TorchReference:
    """One process, one device, no sharding.

    With bf16 or fp16 the model's weights are of that type; fp32 copies of them are what the optimizer updates, and
    gradients of the micro-batches are added up in fp32. fp16 scales the loss (`LossScale`).

    Args:
        run: the resolved config.
        model: on meta, as `build_meta` made it.
        values: first values of its parameters.
        objective: what is minimised.
        device: where everything lives.
    """

    def __init__(
        self, run: ResolvedRun, model: nn.Module, values: ParameterValues, objective: Objective, *, device: torch.device
    ) -> None:
        params = run.config.optimizer.params
        self.rank = 0
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._objective, self._device = objective, device
        self._clip, self._scale = run.config.gradient_clipping, LossScale(run.config.fp16)
        self._decoder = assemble(run, model, None).decoder
        materialise(self._decoder.causal, values, device=device)
        self._decoder.train()
        self._weights = self._decoder.named()
        self._masters = {name: master_of(weight) for name, weight in self._weights.items()}
        groups = decay_groups(self._masters, decayed_names(model), weight_decay=params.weight_decay)
        self._optimizer = make_adamw(groups, params)

    def train_step(self, step: StepBatch, *, lr: float, allow: Gate = always) -> StepResult:
        """See `Engine.train_step`."""
        sums = torch.zeros(1 + len(self._objective.parts), device=self._device)
        for micro in step.micro_batches:
            batch = micro.to(self._device)
            total, *parts = self._decoder(batch.input_ids, batch, self._objective)
            (total * (self._scale.value / step.targets)).backward()
            self._add_gradients()
            sums += torch.stack([total.detach(), *parts])
        means: list[float] = (sums.double() / step.targets).tolist()
        norm = self._gradient_norm() / self._scale.value
        outcome = self._scale.outcome(means[0], norm, allow)
        if outcome is StepOutcome.APPLIED:
            self._update(norm, lr)
        self._optimizer.zero_grad(set_to_none=True)
        return self._scale.result(step.step, means, self._objective.parts, norm, outcome)

    def replicas(self) -> Iterator[Replica]:
        """See `Engine.replicas`: there are none."""
        return iter(())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Sums:
        """See `Engine.evaluate`."""
        self._decoder.eval()
        nats, targets, scoring = 0.0, 0, CrossEntropy()
        for micro in batches:
            batch = micro.to(self._device)
            nats += float(self._decoder(batch.input_ids, batch, scoring)[0])
            targets += int((batch.labels != IGNORE).sum())
        self._decoder.train()
        return Sums(nats, targets)

    def state(self) -> State:
        """See `Engine.state`."""
        return self._named_state()

    def load(self, directory: Path) -> None:
        """See `Engine.load`."""
        state = self._named_state()
        named_state.read(state, directory)
        step = state[named_state.OPTIMIZER_STEP]
        assert isinstance(step, Tensor)
        self._scale.take_up(state)
        for name, master in self._masters.items():
            ensure_state(self._optimizer, master)["step"].copy_(step)
            self._weights[name].data.copy_(master.data)

    def _named_state(self) -> dict[str, NamedShard | Tensor]:
        named: dict[str, NamedShard | Tensor] = {}
        steps = torch.zeros((), dtype=torch.float32)
        for name, master in self._masters.items():
            state, shape = ensure_state(self._optimizer, master), tuple(master.shape)
            named[named_state.weight_key(name)] = NamedShard(shape, start=0, values=master.data.view(-1))
            for moment in MOMENTS:
                named[named_state.moment_key(moment, name)] = NamedShard(shape, start=0, values=state[moment].view(-1))
            steps = state["step"].detach().to("cpu", copy=True)
        return {**named, **self._scale.named(), named_state.OPTIMIZER_STEP: steps}

    def _add_gradients(self) -> None:
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
        factor = self._scale.factor(norm, self._clip)
        for master in self._masters.values():
            if master.grad is not None and factor != 1.0:
                master.grad.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        for name, weight in self._weights.items():
            if self._masters[name] is not weight:
                weight.copy_(self._masters[name])
