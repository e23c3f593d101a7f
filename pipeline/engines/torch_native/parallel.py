"""The native PyTorch engine on several processes: FSDP2 with tensor, context and pipeline parallelism combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.engines.base import (
    NO_LIMITS,
    HostValues,
    Objective,
    PendingStep,
    Replica,
    UpdateLimits,
    no_host_values,
)
from pipeline.engines.common import model_dtype
from pipeline.engines.engine_base import EngineBase, NamedState
from pipeline.engines.optim.build import build_optimizer
from pipeline.engines.optim.groups import parameter_groups
from pipeline.engines.optim.state import ensure_all_states
from pipeline.engines.optim.weight_ema import attach_ema
from pipeline.engines.parallel.assemble import assemble
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.experts import exchanges
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.parallel.overlapped_passes import OverlappedPasses
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.engines.parallel.stages import StageLayers
from pipeline.engines.torch_native import gradients
from pipeline.engines.torch_native.deferred_step import DeferredStep, decide
from pipeline.engines.torch_native.exchange import ExchangedGradients
from pipeline.engines.torch_native.forward_backward import ForwardBackward, GradientAccumulation, zero_sums
from pipeline.engines.torch_native.fp8_gather import refresh_scales
from pipeline.engines.torch_native.fsdp_units import UnitStates
from pipeline.engines.torch_native.pipeline import PipelineSchedule, StageModule
from pipeline.engines.torch_native.sharding import ParameterShard, Sharding, reshard, shard_decoder
from pipeline.engines.torch_native.state import named_shards, replicas, set_step
from pipeline.models.construction.initial_values import ParameterValues
from pipeline.runtime.launch.host_copy import to_device


class TorchParallel(EngineBase, ExchangedGradients):
    """One model on all processes. The process group must be initialized.

    Master weights are fp32 and sharded. With bf16 or fp16, FSDP2 gathers a copy in that dtype for forward and backward
    passes; gradients are accumulated in fp32, over micro-batches and over ranks.
    """

    _mesh: Mesh

    def _build(self, run: ResolvedRun, model: nn.Module, values: ParameterValues) -> None:
        section, self._clip = run.config.optimizer, run.config.gradient_clipping
        built = [self._build_stage(run, model, values, stage) for stage in _own_stages(run, model, self._mesh)]
        self._roots = [root for root, _ in built]
        self._shards, self._copies = _apart([shard for _, shards in built for shard in shards])
        self.decoders = [_decoder(root) for root in self._roots]
        self._forward_backward = self._build_forward_backward(run, model)
        masters = {shard.name: shard.master for shard in self._shards}
        groups = parameter_groups(masters, self._update_scales, section.params)
        self._optimizer = build_optimizer(groups, section)
        if self._matrices:
            self._bind_matrices()
        ensure_all_states(self._optimizer, self._kind)
        attach_ema(self._optimizer, run.config.run.ema)

    def _bind_matrices(self) -> None:
        trained = [s for s in self._shards if s.name in self._matrices and s.sharded.requires_grad]
        held = [(s.master, [s.held(self._matrices[s.name])] if s.master.numel() else []) for s in trained]
        bound: Any = self._optimizer
        bound.bind_matrices(held, self._mesh.stage_group())
        if self._qk_clip is not None:
            rows = self._qk_clip.rows
            scaled = [(s.master, [s.held(rows[s.name])]) for s in self._shards if s.name in rows and s.master.numel()]
            bound.bind_clip(self._qk_clip, scaled)

    def _build_stage(
        self, run: ResolvedRun, model: nn.Module, values: ParameterValues, stage: StageLayers
    ) -> tuple[nn.Module, list[ParameterShard]]:
        zero_stage = run.config.zero_optimization.stage
        local_model = assemble(run, model, self._mesh, stage=stage, balancer=self._balancer)
        decoder = local_model.decoder
        root = decoder if stage.count == 1 else StageModule(decoder, stage)
        sharding = Sharding(
            stage=zero_stage,
            dtype=model_dtype(run.config),
            fp8=run.config.fp8,
            reduce_dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[run.config.communication_data_type],
        )
        # torch's schedules delay the reduction of an FSDP2 stage module until the last micro-batch; stage 3 must not
        # wait, so its FSDP2 root is the decoder inside the stage module
        fsdp_root = decoder if zero_stage == 3 else root
        return root, shard_decoder(
            local_model, values, self._mesh, root=fsdp_root, sharding=sharding, device=self._device
        )

    def _build_forward_backward(self, run: ResolvedRun, model: nn.Module) -> ForwardBackward:
        stage_modules = [root for root in self._roots if isinstance(root, StageModule)]
        passes: OverlappedPasses | None = None
        if run.overlaps_exchange:  # in a pipeline, the two passes run in two stages, with different units
            passes = (
                OverlappedPasses() if stage_modules else OverlappedPasses(switched=UnitStates(self._roots[0]).switch)
            )
        for exchange in (each for root in self._roots for each in exchanges(root)):
            exchange.passes = passes
        if not stage_modules:
            stage = run.config.zero_optimization.stage
            return GradientAccumulation(self._roots[0], stage=stage, device=self._device, passes=passes)
        hidden_size: int = model.config.hidden_size  # type: ignore[union-attr, assignment]
        return PipelineSchedule(
            run, stage_modules, self._mesh, hidden_size=hidden_size, device=self._device, passes=passes
        )

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
        local_gradients = partial(gradients.attached, [*self._shards, *(copy for _, copy in self._copies)])
        sums = self._exchanged(step, train(step.micro_batches), gradients=local_gradients, train=train)
        if not self._reports_loss:
            sums.zero_()
        gradients.finish_reduction(self._shards, self._mesh, self._tied_group, copies=self._copies)
        square = gradients.own_square(self._shards, self._device)
        reduced = torch.cat([sums, square[None], to_device(host_values(), self._device)])
        dist.all_reduce(reduced)  # the only all-reduce of a step whose numbers the host reads
        sums, square, host = reduced[: len(sums)], reduced[len(sums)], reduced[len(sums) + 1 :]
        means, norm = sums / step.targets, square.sqrt() / scale
        decision = decide(means[0], norm, limits=limits, clip=self._clip, scale=scale, after=after)
        if self._qk_clip is not None:
            self._qk_clip.reduce()
        with torch.no_grad():
            decision.step(self._optimizer, lr=lr)
        self._update_copies()
        refresh_scales(shard.sharded for shard in self._shards)
        for shard in [*self._shards, *(copy for _, copy in self._copies)]:
            shard.clear_gradient()
        return DeferredStep(
            step,
            [means, norm, host],
            decision,
            names=self._objective.parts,
            limits=limits,
            scaler=self._scaler,
            measures=self._measures,
        )

    def _train(self, micro_batches: Sequence[MicroBatch], *, scale: float) -> Tensor:
        """Calls `ForwardBackward.train`; a replica of the model may have no micro-batch in a step."""
        batches = [micro.to(self._device) for micro in micro_batches]
        if not batches:
            return zero_sums(self._objective, self._device)
        return self._forward_backward.train(batches, self._objective, scale=scale)

    @torch.no_grad()
    def _update_copies(self) -> None:
        for shard, copy in self._copies:
            copy.attach()
            copy.master.copy_(shard.master)

    def replicas(self) -> Iterator[Replica]:
        """Implements `Engine.replicas`: HSDP replicas, parameters not sharded by tp, weights tied across stages."""
        return replicas(self._shards, self._mesh, self._tied_group)

    def _score(self, batch: MicroBatch, objective: Objective) -> Tensor:
        return self._forward_backward.score(batch, objective)[0]

    def _local_state(self) -> tuple[NamedState, Callable[[], None]]:
        named = named_shards(self._shards, self._optimizer, self._kind_of)
        return named, partial(self._restore, named)

    def _restore(self, state: NamedState) -> None:
        set_step(self._shards, self._optimizer, self._kind_of, state.get(named_state.OPTIMIZER_STEP))
        for root in self._roots:
            reshard(root)
        self._update_copies()
        refresh_scales(shard.sharded for shard in self._shards)


def _decoder(root: nn.Module) -> Decoder:
    """Returns the decoder, or this stage's part of it, within a root module."""
    decoder = root.decoder if isinstance(root, StageModule) else root
    assert isinstance(decoder, Decoder)
    return decoder


def _apart(
    shards: Sequence[ParameterShard],
) -> tuple[list[ParameterShard], list[tuple[ParameterShard, ParameterShard]]]:
    """Returns one shard per parameter, and (shard, copy) of weights tied between two stages of this rank."""
    first: dict[str, ParameterShard] = {}
    copies = [(first[each.name], each) for each in shards if first.setdefault(each.name, each) is not each]
    return list(first.values()), copies


def _own_stages(run: ResolvedRun, model: nn.Module, mesh: Mesh) -> list[StageLayers]:
    """Returns the (virtual) pipeline stages that this rank holds."""
    stages, own = pipeline_stages(run, model), mesh.coordinates["pp"]
    return [stage for stage in stages if run.rank_of_stage(stage.index) == own]
