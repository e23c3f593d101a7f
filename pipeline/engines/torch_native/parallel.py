"""The native engine on several processes: FSDP2, tensor, context and pipeline parallelism, in any combination."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.checkpoint.plan import State
from pipeline.checkpoint.shards import NamedShard
from pipeline.config.rules import ResolvedRun
from pipeline.data.loader import IGNORE, MicroBatch, StepBatch
from pipeline.engines.base import Gate, Objective, Replica, StepOutcome, StepResult, Sums, always
from pipeline.engines.common import decay_groups, decayed_names, make_adamw, model_dtype
from pipeline.engines.loss_scale import LossScale
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.torch_native import gradients
from pipeline.engines.torch_native.passes import Accumulation, Passes
from pipeline.engines.torch_native.pipeline import Pipeline, StageModule
from pipeline.engines.torch_native.sharding import Part, reshard, shard
from pipeline.engines.torch_native.state import named_shards, replicas, set_step
from pipeline.models.values import ParameterValues
from pipeline.parallel.assemble import assemble, stages_of
from pipeline.parallel.mesh import Mesh, ends_group
from pipeline.parallel.stages import StageLayers, is_tied


class TorchParallel:
    """One model on all processes. The process group is open.

    Weights are fp32 and sharded; with bf16 or fp16 a copy in that type is gathered for computing, and gradients are
    added up in fp32, over micro-batches and over ranks.

    Args:
        run: the resolved config.
        model: on meta, as `build_meta` made it.
        values: first values of its parameters.
        objective: what is minimised.
        device: of this rank.
        mesh: this rank's place and groups.
    """

    def __init__(
        self,
        run: ResolvedRun,
        model: nn.Module,
        values: ParameterValues,
        objective: Objective,
        *,
        device: torch.device,
        mesh: Mesh,
    ) -> None:
        params = run.config.optimizer.params
        self.rank = dist.get_rank()
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._objective, self._device, self._clip = objective, device, run.config.gradient_clipping
        self._scale = LossScale(run.config.fp16)
        self._mesh = mesh
        made = [self._make(run, model, values, stage) for stage in _own_stages(run, model, self._mesh)]
        self._roots = [root for root, _ in made]
        self._parts = [part for _, parts in made for part in parts]
        self._shared = ends_group(run.topology) if is_tied(model) else None
        self._brings_sums = self._mesh.place["tp"] == 0 and self._mesh.place["pp"] == run.topology.pp - 1
        self._passes = self._make_passes(run, model)
        self._train(True)
        masters = {part.name: part.master for part in self._parts}
        groups = decay_groups(masters, decayed_names(model), weight_decay=params.weight_decay)
        self._optimizer = make_adamw(groups, params)

    def _make(
        self, run: ResolvedRun, model: nn.Module, values: ParameterValues, stage: StageLayers
    ) -> tuple[nn.Module, list[Part]]:
        degree = run.config.zero_optimization.stage
        assembled = assemble(run, model, self._mesh, stage=stage)
        decoder = assembled.decoder
        root = decoder if stage.count == 1 else StageModule(decoder, stage)
        sharding: dict[str, Any] = {"stage": degree, "dtype": model_dtype(run.config), "device": self._device}
        # torch's schedules hold back FSDP2 until the last micro-batch where they see it: not so for stage 3
        called = decoder if degree == 3 else root
        return root, shard(assembled, values, self._mesh, root=called, **sharding)

    def _make_passes(self, run: ResolvedRun, model: nn.Module) -> Passes:
        pieces = [root for root in self._roots if isinstance(root, StageModule)]
        if not pieces:
            return Accumulation(self._roots[0], stage=run.config.zero_optimization.stage, device=self._device)
        width: int = model.config.hidden_size  # type: ignore[union-attr, assignment]
        return Pipeline(run, pieces, self._mesh, width=width, device=self._device)

    def train_step(self, step: StepBatch, *, lr: float, allow: Gate = always) -> StepResult:
        """See `Engine.train_step`."""
        batches = [micro.to(self._device) for micro in step.micro_batches]
        sums = self._passes.train(batches, self._objective, scale=self._scale.value / step.targets)
        means: list[float] = (self._over_all(sums) / step.targets).tolist()
        gradients.complete(self._parts, self._mesh, self._shared)
        norm = gradients.norm(self._parts, self._device) / self._scale.value
        outcome = self._scale.outcome(means[0], norm, allow)
        if outcome is StepOutcome.APPLIED:
            self._update(norm, lr)
        for part in self._parts:
            part.detach()
        return self._scale.result(step.step, means, self._objective.parts, norm, outcome)

    def replicas(self) -> Iterator[Replica]:
        """See `Engine.replicas`: copies of sharded parts, what tensor parallelism left whole, what two stages hold."""
        return replicas(self._parts, self._mesh, self._shared)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Sums:
        """See `Engine.evaluate`."""
        self._train(False)
        scoring = CrossEntropy()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for micro in batches:
            batch = micro.to(self._device)
            sums[0] += self._passes.score(batch, scoring)[0]
            sums[1] += (batch.labels != IGNORE).sum()
        self._train(True)
        nats, targets = self._over_all(sums).tolist()
        return Sums(nats, int(targets))

    def state(self) -> State:
        """See `Engine.state`."""
        return self._named_state()

    def load(self, directory: Path) -> None:
        """See `Engine.load`."""
        state = self._named_state()
        named_state.read(state, directory)
        step = state[named_state.OPTIMIZER_STEP]
        assert isinstance(step, Tensor)
        set_step(self._parts, self._optimizer, step)
        self._scale.take_up(state)
        for root in self._roots:
            reshard(root)

    def _named_state(self) -> dict[str, NamedShard | Tensor]:
        return {**named_shards(self._parts, self._optimizer), **self._scale.named()}

    def _over_all(self, sums: Tensor) -> Tensor:
        """Adds up sums over the data ranks; of the ranks that share a model, one that sees the loss brings them."""
        if not self._brings_sums:
            sums.zero_()
        dist.all_reduce(sums)
        return sums

    @torch.no_grad()
    def _update(self, norm: float, lr: float) -> None:
        present = [g for part in self._parts if (g := part.master.grad) is not None]
        factor = self._scale.factor(norm, self._clip)
        if factor != 1.0:
            torch._foreach_mul_(present, factor)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def _train(self, mode: bool) -> None:
        for root in self._roots:
            root.train(mode)


def _own_stages(run: ResolvedRun, model: nn.Module, mesh: Mesh) -> list[StageLayers]:
    """The pieces of the model that this rank holds."""
    return [stage for stage in stages_of(run, model) if stage.index % run.topology.pp == mesh.place["pp"]]
