"""The native PyTorch engine on one GPU (or one CPU process), for models that nearly fill its memory.

In bf16 with AdamW it needs 14 bytes per parameter: the weight (2) and the rest of its fp32 master (2, see
`optim.split_master`), the gradient (2), and two moments (8; 4 in bf16, 2.03 in 8 bits, see `optim.small_moments`). With
several micro-batches per step, gradients are added up in fp32 (4), and each is freed once added. The update runs on
some of the parameters at a time, so that its fp32 copies stay small. Numbers are copied to the host once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.optimizers import EMA
from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.engines.base import NO_LIMITS, HostValues, Objective, PendingStep, UpdateLimits, no_host_values
from pipeline.engines.engine_base import EngineBase, NamedState
from pipeline.engines.optim.build import build_optimizer
from pipeline.engines.optim.groups import parameter_groups
from pipeline.engines.optim.qk_clip import whole_rows
from pipeline.engines.optim.small_moments import AdamWSmallMoments
from pipeline.engines.optim.split_master import joined, split
from pipeline.engines.optim.state import ensure_all_states, set_step_counter, step_counter
from pipeline.engines.optim.weight_ema import attach_ema
from pipeline.engines.parallel.assemble import assemble
from pipeline.engines.torch_native.deferred_step import DeferredStep, UpdateDecision, decide
from pipeline.engines.torch_native.exchange import ExchangedGradients
from pipeline.models.construction.counter import CPU
from pipeline.models.construction.initial_values import ParameterValues
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.rectangle import Rectangle
from pipeline.runtime.launch.host_copy import to_device

UPDATE_ELEMENTS = 1 << 27
"""Number of parameters updated at once: their fp32 copies take 8 bytes each, 1 GiB."""


@dataclass
class _Master:
    """A parameter and its fp32 master weight.

    Attributes:
        weight: the model's weight.
        parameter: tensor that the optimizer updates. In fp32 it is the weight itself; otherwise it has the master's
            values, always (fp16) or only during an update (bf16).
        residual: the 16 bits of the master that the bf16 weight lacks, int16; None in other precisions.
        gradient: fp32 sum over the micro-batches of a step, if there are several.
    """

    weight: nn.Parameter
    parameter: nn.Parameter
    residual: Tensor | None
    gradient: Tensor | None = None

    def values(self) -> Tensor:
        """Returns the fp32 master weight."""
        if self.residual is None:
            return self.parameter.data
        return joined(self.weight.data, self.residual)

    def set(self, values: Tensor) -> None:
        """Replaces the master weight and the model's weight."""
        if self.residual is not None:
            split(values, self.weight.data, self.residual)
            return
        self.parameter.data.copy_(values)
        if self.parameter is not self.weight:
            self.weight.data.copy_(values)

    def add_gradient(self, weight: Tensor) -> None:
        """Adds the weight's gradient to the sum over micro-batches, and frees it."""
        assert weight.grad is not None
        if self.gradient is None:
            self.gradient = weight.grad.float()
        else:
            self.gradient.add_(weight.grad)
        weight.grad = None

    def fp32_gradient(self) -> Tensor:
        """Returns the fp32 sum over the micro-batches so far, without removing it; zeros before the first."""
        if self.weight.dtype == torch.float32:
            if self.weight.grad is None:
                self.weight.grad = torch.zeros_like(self.weight)
            return self.weight.grad
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.weight, dtype=torch.float32)
        return self.gradient

    def take_gradient(self) -> Tensor | None:
        """Returns and removes the gradient of the step, in fp32 or the model's dtype."""
        taken = self.gradient if self.gradient is not None else self.weight.grad
        self.gradient = self.weight.grad = None
        return taken


class TorchSingle(EngineBase, ExchangedGradients):
    """The engine for one process and one device, without sharding."""

    def _build(self, run: ResolvedRun, model: nn.Module, values: ParameterValues) -> None:
        section, self._clip = run.config.optimizer, run.config.gradient_clipping
        self._decoder = assemble(run, model, None, balancer=self._balancer).decoder
        self.decoders = [self._decoder]
        recorded = _Residuals(values)
        materialize(self._decoder.causal, recorded, device=self._device, names=None)
        weights = self._decoder.parameters_by_name()
        self._masters = {name: _master(weight, recorded.residuals.pop(name, None)) for name, weight in weights.items()}
        if run.batch.accumulation > 1 or run.replicated:
            for master in self._masters.values():
                if master.weight.dtype != torch.float32:
                    master.weight.register_post_accumulate_grad_hook(master.add_gradient)
        self._updates: list[_Update] = []
        for names in _by_size(self._masters):
            masters = {name: self._masters[name] for name in names}
            updated = {name: master.parameter for name, master in masters.items()}
            groups = parameter_groups(updated, self._update_scales, section.params)
            optimizer: Any = build_optimizer(groups, section)
            if self._matrices:
                optimizer.bind_whole(updated, self._matrices)
            if self._qk_clip is not None:
                optimizer.bind_clip(self._qk_clip, whole_rows(updated, self._qk_clip))
            self._updates.append(_Update(masters, optimizer))
        for update in self._updates:
            with update.master_values():
                ensure_all_states(update.optimizer, self._kind)
            attach_ema(update.optimizer, run.config.run.ema)

    def begin_step(
        self,
        step: StepBatch,
        *,
        lr: float,
        limits: UpdateLimits = NO_LIMITS,
        after: PendingStep | None = None,
        host_values: HostValues = no_host_values,
    ) -> DeferredStep:
        """Implements `Engine.begin_step`."""
        scale = self._scaler.value
        if self._balancer is not None:
            self._balancer.begin_step(scale / step.targets)
        if self._qk_clip is not None:
            self._qk_clip.begin_step()
        train = partial(self._train, scale=scale / step.targets)
        sums = self._exchanged(step, train(step.micro_batches), gradients=self._fp32_gradients, train=train)
        means, norm = sums.double() / step.targets, self._gradient_norm() / scale
        decision = decide(means[0], norm, limits=limits, clip=self._clip, scale=scale, after=after)
        if self._qk_clip is not None:
            self._qk_clip.reduce()
        for update in self._updates:
            update.run(decision, lr=lr)
        return DeferredStep(
            step,
            [means, norm, to_device(host_values(), self._device)],
            decision,
            names=self._objective.parts,
            limits=limits,
            scaler=self._scaler,
            measures=self._measures,
        )

    def _train(self, micro_batches: Sequence[MicroBatch], *, scale: float) -> Tensor:
        """Accumulates gradients over micro-batches. Returns the sums of the loss and its parts, fp32 [1 + parts]."""
        sums = torch.zeros(1 + len(self._objective.parts), device=self._device)
        for micro in micro_batches:
            batch = micro.to(self._device)
            total, *parts = self._decoder(batch.input_ids, batch, self._objective)
            (total * scale).backward()
            sums += torch.stack([total.detach(), *parts])
        return sums

    def _fp32_gradients(self) -> list[Tensor]:
        return [master.fp32_gradient() for master in self._masters.values() if master.weight.requires_grad]

    def _score(self, batch: MicroBatch, objective: Objective) -> Tensor:
        total: Tensor = self._decoder(batch.input_ids, batch, objective)[0]
        return total.double()

    def _master_values(self) -> dict[str, Tensor]:
        """Returns the fp32 master weights; joins split ones on the CPU, as 4 more bytes each might not fit the GPU."""
        return {
            name: master.values() if master.residual is None else master.values().cpu()
            for name, master in self._masters.items()
        }

    def _local_state(self) -> tuple[NamedState, Callable[[], None]]:
        masters = self._master_values()
        named: NamedState = {}
        state: dict[str, Tensor] = {}
        for update in self._updates:
            for name, master in update.masters.items():
                state, shape = update.optimizer.state[master.parameter], tuple(master.weight.shape)
                kind = self._kind_of(name)
                tensors = (masters[name], *(update.moment(master, each) for each in kind.states))
                for key, tensor in zip(named_state.parameter_keys(name, kind), tensors, strict=True):
                    named[key] = NamedShard(shape, start=0, values=tensor.view(-1))
        if self._kind.counts_steps:
            named[named_state.OPTIMIZER_STEP] = step_counter(state)
        return named, partial(self._restore, named, masters)

    def _restore(self, state: NamedState, masters: dict[str, Tensor]) -> None:
        counter = state.get(named_state.OPTIMIZER_STEP)
        for update in self._updates:
            for name, master in update.masters.items():
                master.set(masters[name].to(self._device))
                kept = update.optimizer.state[master.parameter]
                set_step_counter(kept, counter)
                if isinstance(update.optimizer, AdamWSmallMoments):
                    for each in (each for each in self._kind.states if each != EMA):
                        key = named_state.moment_key(each, name)
                        update.optimizer.set_moment(master.parameter, each, _whole(state[key]))

    def _gradient_norm(self) -> Tensor:
        """Computes the gradient's 2-norm, fp64 scalar on the device; each tensor's norm is computed in fp32."""
        gradients = [each for m in self._masters.values() if (each := _gradient(m)) is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm.double()


class _Update:
    """The update of some parameters.

    Attributes:
        masters: master weights by parameter name.
        optimizer: optimizer that updates the masters' `parameter`.
    """

    def __init__(self, masters: dict[str, _Master], optimizer: torch.optim.Optimizer) -> None:
        self.masters, self.optimizer = masters, optimizer

    @torch.no_grad()
    def run(self, decision: UpdateDecision, *, lr: float) -> None:
        """Updates the master weights and the model's weights, and frees the gradients."""
        with self.master_values():
            for master in self.masters.values():
                gradient = master.take_gradient()
                if gradient is not None:
                    master.parameter.grad = gradient.float()
            decision.step(self.optimizer, lr=lr)
            for master in self.masters.values():
                master.parameter.grad = None
                if master.parameter is not master.weight:
                    master.set(master.parameter.data)

    def moment(self, master: _Master, name: str) -> Tensor:
        """Returns a state in the form of checkpoints: itself if it is fp32, else an exact fp32 copy on the CPU."""
        if isinstance(self.optimizer, AdamWSmallMoments) and name != EMA:
            return self.optimizer.moment(master.parameter, name)
        moment: Tensor = self.optimizer.state[master.parameter][name]
        return moment

    def master_values(self) -> _MasterValues:
        """Returns a context in which split master weights are joined in the memory of `parameter`."""
        return _MasterValues([master for master in self.masters.values() if master.residual is not None])


class _MasterValues:
    def __init__(self, masters: list[_Master]) -> None:
        self._masters = masters

    def __enter__(self) -> None:
        for master in self._masters:
            master.parameter.data = master.values()

    def __exit__(self, *_error: object) -> None:
        for master in self._masters:
            master.parameter.data = torch.empty(0, device=master.weight.device)


class _Residuals:
    """Initial values that store, on the weight's device, the part of each value that its bf16 weight lacks.

    Args:
        values: initial values of the parameters.
    """

    def __init__(self, values: ParameterValues) -> None:
        self._values = values
        self.residuals: dict[str, Tensor] = {}

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        """Implements `ParameterValues.value`."""
        value = self._values.value(name, box=box, device=device)
        self.residuals[name] = torch.empty(value.shape, dtype=torch.int16, device=device)
        split(value, torch.empty(value.shape, dtype=torch.bfloat16, device=device), self.residuals[name])
        return value

    def buffer(self, name: str) -> Tensor | None:
        """Implements `ParameterValues.buffer`."""
        return self._values.buffer(name)


def _master(weight: nn.Parameter, residual: Tensor | None) -> _Master:
    if weight.dtype == torch.float32:
        return _Master(weight, weight, None)
    if weight.dtype == torch.bfloat16:
        empty = nn.Parameter(torch.empty(0, device=weight.device), requires_grad=weight.requires_grad)
        return _Master(weight, empty, residual)
    return _Master(weight, nn.Parameter(weight.detach().float(), requires_grad=weight.requires_grad), None)


def _whole(shard: NamedShard | Tensor) -> Tensor:
    """Returns the values of an unsharded tensor."""
    assert isinstance(shard, NamedShard)
    values: Tensor
    [values] = shard.parts.values()
    return values


def _gradient(master: _Master) -> Tensor | None:
    return master.gradient if master.gradient is not None else master.weight.grad


def _by_size(masters: dict[str, _Master]) -> Iterator[list[str]]:
    """Yields the names of parameters to update together."""
    names: list[str] = []
    elements = 0
    for name, master in masters.items():
        if names and elements + master.weight.numel() > UPDATE_ELEMENTS:
            yield names
            names, elements = [], 0
        names.append(name)
        elements += master.weight.numel()
    if names:
        yield names
