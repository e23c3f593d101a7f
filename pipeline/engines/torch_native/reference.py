"""The reference engine: one plain PyTorch process, short enough to read. All layouts are compared with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shard_table import State
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.memory.shard_files import ShardFiles
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.optimizers import OptimizerKind
from pipeline.data.micro_batch import IGNORE, MicroBatch, StepBatch
from pipeline.engines.base import (
    NO_LIMITS,
    EvaluationSums,
    FinishedStep,
    HostValues,
    Objective,
    PendingStep,
    Replica,
    StepMeasure,
    StepOutcome,
    TrainsStepByStep,
    UpdateLimits,
    no_host_values,
)
from pipeline.engines.common import (
    master_weight,
    matrices_of,
    update_scales,
    with_measures,
)
from pipeline.engines.loss_scale import LossScaler
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.optim.build import build_optimizer
from pipeline.engines.optim.groups import parameter_groups, set_learning_rate
from pipeline.engines.optim.qk_clip import make_qk_clip, whole_rows
from pipeline.engines.optim.state import ensure_all_states, ensure_state, set_step_counter, step_counter
from pipeline.engines.optim.weight_ema import attach_ema
from pipeline.engines.parallel.assemble import assemble
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.expert_balance import make_balancer
from pipeline.engines.torch_native.exchange import ExchangedGradients
from pipeline.models.construction.initial_values import ParameterValues
from pipeline.models.construction.materialize import materialize


class TorchReference(TrainsStepByStep, ExchangedGradients):
    """One process, one device, no sharding.

    With bf16 or fp16 the model's weights have that dtype; the optimizer updates fp32 master weights, and gradients are
    accumulated over micro-batches in fp32. fp16 uses loss scaling (`LossScaler`).

    Args:
        run: the resolved config.
        model: the full model, on meta, as `build_meta` made it.
        values: initial values of its parameters.
        objective: the loss.
        device: device of model and optimizer.
    """

    def __init__(
        self, run: ResolvedRun, model: nn.Module, values: ParameterValues, objective: Objective, *, device: torch.device
    ) -> None:
        section = run.config.optimizer
        self._kind = run.config.state_kind
        self.rank, self.deferred = 0, False
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._objective, self._device, self._seed = objective, device, run.config.run.seed
        self._clip, self._scaler = run.config.gradient_clipping, LossScaler(run.config.fp16)
        self._balancer = make_balancer(run.config.moe, model, device=device)
        self._qk_clip = make_qk_clip(section, model, device=device, mesh=None)
        measures: tuple[StepMeasure | None, ...] = (self._balancer, self._qk_clip)
        self._measures = [each for each in measures if each is not None]
        self._matrices = matrices_of(model, section)
        scales = update_scales(model, run.config.model, section)
        self._decoder = assemble(run, model, None, balancer=self._balancer).decoder
        materialize(self._decoder.causal, values, device=device)
        self._decoder.train()
        self._weights = self._decoder.parameters_by_name()
        self._masters = {name: master_weight(weight) for name, weight in self._weights.items()}
        groups = parameter_groups(self._masters, scales, section.params)
        self._optimizer = build_optimizer(groups, section)
        if self._matrices:
            bound: Any = self._optimizer
            bound.bind_whole(self._masters, self._matrices)
            if self._qk_clip is not None:
                self._qk_clip.attach(self._decoder.causal)
                bound.bind_clip(self._qk_clip, whole_rows(self._masters, self._qk_clip))
        ensure_all_states(self._optimizer, self._kind)
        attach_ema(self._optimizer, run.config.run.ema)

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
        torch.manual_seed(self._seed + step.step)  # for dropout and jitter: a resumed run draws the same numbers
        if self._balancer is not None:
            self._balancer.begin_step(self._scaler.value / step.targets)
        if self._qk_clip is not None:
            self._qk_clip.begin_step()
        train = partial(self._train, targets=step.targets)
        sums = self._exchanged(step, train(step.micro_batches), gradients=self._gradients, train=train)
        means: list[float] = (sums.double() / step.targets).tolist()
        norm = self._gradient_norm() / self._scaler.value
        outcome = self._scaler.outcome(means[0], norm, limits)
        if self._qk_clip is not None:
            self._qk_clip.reduce()
        if outcome is StepOutcome.APPLIED:
            self._update(norm, lr)
        self._optimizer.zero_grad(set_to_none=True)
        names, host = self._objective.parts, host_values()
        result = self._scaler.result(step.step, means, names, norm, outcome, host_sums=host)
        return FinishedStep(with_measures(self._measures, result, targets=step.targets))

    def _train(self, micro_batches: Sequence[MicroBatch], *, targets: int) -> Tensor:
        """Accumulates gradients over micro-batches. Returns the sums of the loss and its parts, fp32 [1 + parts]."""
        sums = torch.zeros(1 + len(self._objective.parts), device=self._device)
        for micro in micro_batches:
            batch = micro.to(self._device)
            total, *parts = self._decoder(batch.input_ids, batch, self._objective)
            (total * (self._scaler.value / targets)).backward()
            self._accumulate_gradients()
            sums += torch.stack([total.detach(), *parts])
        return sums

    def _gradients(self) -> list[Tensor]:
        trained = [master for master in self._masters.values() if master.requires_grad]
        for master in trained:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in trained if master.grad is not None]

    @property
    def decoders(self) -> list[Decoder]:
        """Implements `Engine.decoders`."""
        return [self._decoder]

    def replicas(self) -> Iterator[Replica]:
        """Implements `Engine.replicas`: one process has none."""
        return iter(())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> EvaluationSums:
        """Implements `Engine.evaluate`."""
        self._decoder.eval()
        nats, targets, objective = 0.0, 0, CrossEntropy()
        for micro in batches:
            batch = micro.to(self._device)
            nats += float(self._decoder(batch.input_ids, batch, objective)[0])
            targets += int((batch.labels != IGNORE).sum())
        self._decoder.train()
        return EvaluationSums(nats, targets)

    @torch.no_grad()
    def forward_passes(self, batches: Iterable[MicroBatch], objective: Objective) -> None:
        """Implements `Engine.forward_passes`."""
        self._decoder.eval()
        for micro in batches:
            batch = micro.to(self._device)
            self._decoder(batch.input_ids, batch, objective)
        self._decoder.train()

    def state(self) -> State:
        """Implements `Engine.state`."""
        return self._named_state()

    def load(self, directory: Path, *, fresh_optimizer: bool = False, files: ShardFiles | None = None) -> None:
        """Implements `Engine.load`."""
        with self.edit_state() as state:
            named_state.read(state, directory, fresh_optimizer=fresh_optimizer, files=files)

    @contextmanager
    def edit_state(self) -> Iterator[State]:
        """Implements `Engine.edit_state`."""
        state = self._named_state()
        yield state
        counter = state.get(named_state.OPTIMIZER_STEP)
        self._scaler.load_state_dict(state)
        if self._balancer is not None:
            self._balancer.load_state_dict(state)
        for name, master in self._masters.items():
            set_step_counter(ensure_state(self._optimizer, master, self._kind_of(name)), counter)
            self._weights[name].data.copy_(master.data)

    def _named_state(self) -> dict[str, NamedShard | Tensor]:
        named: dict[str, NamedShard | Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            kind = self._kind_of(name)
            state, shape = ensure_state(self._optimizer, master, kind), tuple(master.shape)
            values = (master.data, *(state[each] for each in kind.states))
            for key, tensor in zip(named_state.parameter_keys(name, kind), values, strict=True):
                named[key] = NamedShard(shape, start=0, values=tensor.view(-1))
        counter = {named_state.OPTIMIZER_STEP: step_counter(state)} if self._kind.counts_steps else {}
        experts = self._balancer.state_dict() if self._balancer else {}
        return {
            **named,
            **experts,
            **named_state.buffer_state(self._decoder.causal),
            **self._scaler.state_dict(),
            **counter,
        }

    def _kind_of(self, name: str) -> OptimizerKind:
        return self._kind.of(matrix=name in self._matrices)

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
        set_learning_rate(self._optimizer, lr)
        self._optimizer.step()
        for name, weight in self._weights.items():
            if self._masters[name] is not weight:
                weight.copy_(self._masters[name])
