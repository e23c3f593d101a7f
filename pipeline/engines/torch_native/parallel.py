"""The native PyTorch engine on several processes: FSDP2 with tensor, context and pipeline parallelism combined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shard_table import State
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.memory.shard_files import ShardFiles
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.loader import IGNORE, MicroBatch, StepBatch
from pipeline.engines.base import (
    NO_LIMITS,
    EvaluationSums,
    HostValues,
    Objective,
    PendingStep,
    Replica,
    TrainsStepByStep,
    UpdateLimits,
    no_host_values,
)
from pipeline.engines.common import model_dtype, samples_text, update_scales
from pipeline.engines.loss_scale import LossScaler
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.optim.build import build_optimizer
from pipeline.engines.optim.groups import parameter_groups
from pipeline.engines.optim.state import ensure_all_states
from pipeline.engines.parallel.assemble import assemble
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.expert_balance import make_balancer
from pipeline.engines.parallel.mesh import Mesh, tied_weights_group
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.engines.parallel.stages import StageLayers, is_tied
from pipeline.engines.torch_native import gradients
from pipeline.engines.torch_native.deferred_step import DeferredStep, decide
from pipeline.engines.torch_native.exchange import ExchangedGradients
from pipeline.engines.torch_native.forward_backward import ForwardBackward, GradientAccumulation, zero_sums
from pipeline.engines.torch_native.fp8_gather import refresh_scales
from pipeline.engines.torch_native.pipeline import PipelineSchedule, StageModule
from pipeline.engines.torch_native.sharding import ParameterShard, Sharding, reshard, shard_decoder
from pipeline.engines.torch_native.state import named_shards, replicas, set_step
from pipeline.models.build.initial_values import ParameterValues
from pipeline.runtime.launch.host_copy import to_device


class TorchParallel(TrainsStepByStep, ExchangedGradients):
    """One model on all processes. The process group must be initialized.

    Master weights are fp32 and sharded; with bf16 or fp16, FSDP2 gathers a copy in that dtype for forward and backward
    passes, and gradients are accumulated in fp32, over micro-batches and over ranks.

    Args:
        run: the resolved config.
        model: on meta, as `build_meta` made it.
        values: initial values of its parameters.
        objective: the loss.
        device: of this rank.
        mesh: this rank's coordinates and process groups.
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
        section = run.config.optimizer
        self._kind = section.kind
        self.rank = dist.get_rank()
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._objective, self._device, self._clip = objective, device, run.config.gradient_clipping
        self._scaler = LossScaler(run.config.fp16)
        self.deferred = device.type == "cuda" and not self._scaler.enabled and not samples_text(run.config)
        self._mesh = mesh
        self._balancer = make_balancer(run.config.moe, model, device=device)
        scales = update_scales(model, run.config.model)
        built = [self._build_stage(run, model, values, stage) for stage in _own_stages(run, model, self._mesh)]
        self._roots = [root for root, _ in built]
        self._shards = [shard for _, shards in built for shard in shards]
        self._tied_group = tied_weights_group(run.topology) if is_tied(model) else None
        self._reports_loss = self._mesh.coordinates["tp"] == 0 and self._mesh.coordinates["pp"] == run.topology.pp - 1
        self._forward_backward = self._build_forward_backward(run, model)
        self._set_training(True)
        masters = {shard.name: shard.master for shard in self._shards}
        groups = parameter_groups(masters, scales, section.params)
        self._optimizer = build_optimizer(groups, section)
        ensure_all_states(self._optimizer, self._kind)

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
            node=run.config.zero_optimization.zero_hpz_partition_size,
        )
        # torch's schedules delay the reduction of an FSDP2 stage module until the last micro-batch; stage 3 must not
        # be delayed, so there the decoder inside the stage module is the FSDP2 root
        fsdp_root = decoder if zero_stage == 3 else root
        return root, shard_decoder(
            local_model, values, self._mesh, root=fsdp_root, sharding=sharding, device=self._device
        )

    def _build_forward_backward(self, run: ResolvedRun, model: nn.Module) -> ForwardBackward:
        stage_modules = [root for root in self._roots if isinstance(root, StageModule)]
        if not stage_modules:
            return GradientAccumulation(self._roots[0], stage=run.config.zero_optimization.stage, device=self._device)
        hidden_size: int = model.config.hidden_size  # type: ignore[union-attr, assignment]
        return PipelineSchedule(run, stage_modules, self._mesh, hidden_size=hidden_size, device=self._device)

    def begin_step(
        self,
        step: StepBatch,
        *,
        lr: float,
        limits: UpdateLimits = NO_LIMITS,
        after: PendingStep | None = None,
        host_values: HostValues = no_host_values,
    ) -> DeferredStep:
        """See `Engine.begin_step`."""
        scale, names = self._scaler.value, self._objective.parts
        if self._balancer is not None:
            self._balancer.begin_step(scale / step.targets)
        train = partial(self._train, scale=scale / step.targets)
        local_gradients = partial(gradients.attached, self._shards)
        sums = self._exchanged(step, train(step.micro_batches), gradients=local_gradients, train=train)
        if not self._reports_loss:
            sums.zero_()
        gradients.finish_reduction(self._shards, self._mesh, self._tied_group)
        square = gradients.own_square(self._shards, self._device)
        reduced = torch.cat([sums, square[None], to_device(host_values(), self._device)])
        dist.all_reduce(reduced)  # the only one of a step whose numbers the host reads
        sums, square, host = reduced[: len(sums)], reduced[len(sums)], reduced[len(sums) + 1 :]
        means, norm = sums / step.targets, square.sqrt() / scale
        decision = decide(means[0], norm, limits=limits, clip=self._clip, scale=scale, after=after)
        with torch.no_grad():
            decision.step(self._optimizer, lr=lr)
        refresh_scales(shard.sharded for shard in self._shards)
        for shard in self._shards:
            shard.clear_gradient()
        load = [] if self._balancer is None else [self._balancer.end_step(targets=step.targets, vetoed=decision.vetoed)]
        return DeferredStep(
            step.step,
            [means, norm, host, *load],
            decision,
            names=names,
            limits=limits,
            scaler=self._scaler,
            balancer=self._balancer,
        )

    def _train(self, micro_batches: Sequence[MicroBatch], *, scale: float) -> Tensor:
        """See `ForwardBackward.train`; a replica of the model may have no micro-batch in a step."""
        batches = [micro.to(self._device) for micro in micro_batches]
        if not batches:
            return zero_sums(self._objective, self._device)
        return self._forward_backward.train(batches, self._objective, scale=scale)

    @property
    def decoders(self) -> list[Decoder]:
        """See `Engine.decoders`."""
        return [_decoder(root) for root in self._roots]

    def replicas(self) -> Iterator[Replica]:
        """See `Engine.replicas`: HSDP replicas, parameters that tp does not shard, weights tied across stages."""
        return replicas(self._shards, self._mesh, self._tied_group)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> EvaluationSums:
        """See `Engine.evaluate`."""
        self._set_training(False)
        objective = CrossEntropy()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for micro in batches:
            batch = micro.to(self._device)
            sums[0] += self._forward_backward.score(batch, objective)[0]
            sums[1] += (batch.labels != IGNORE).sum()
        self._set_training(True)
        nats, targets = self._all_reduce_sums(sums).tolist()
        return EvaluationSums(nats, int(targets))

    @torch.no_grad()
    def forward_passes(self, batches: Iterable[MicroBatch], objective: Objective) -> None:
        """See `Engine.forward_passes`."""
        self._set_training(False)
        for micro in batches:
            self._forward_backward.score(micro.to(self._device), objective)
        self._set_training(True)

    def state(self) -> State:
        """See `Engine.state`."""
        return self._named_state()

    def load(self, directory: Path, *, fresh_optimizer: bool = False, files: ShardFiles | None = None) -> None:
        """See `Engine.load`."""
        with self.edit_state() as state:
            named_state.read(state, directory, fresh_optimizer=fresh_optimizer, files=files)

    @contextmanager
    def edit_state(self) -> Iterator[State]:
        """See `Engine.edit_state`."""
        state = self._named_state()
        yield state
        set_step(self._shards, self._optimizer, self._kind, state.get(named_state.OPTIMIZER_STEP))
        self._scaler.load_state_dict(state)
        if self._balancer is not None:
            self._balancer.load_state_dict(state)
        for root in self._roots:
            reshard(root)
        refresh_scales(shard.sharded for shard in self._shards)

    def _named_state(self) -> dict[str, NamedShard | Tensor]:
        experts = self._balancer.state_dict() if self._balancer else {}
        buffers = {key: value for root in self._roots for key, value in named_state.buffer_state(_causal(root)).items()}
        return {
            **named_shards(self._shards, self._optimizer, self._kind),
            **experts,
            **buffers,
            **self._scaler.state_dict(),
        }

    def _all_reduce_sums(self, sums: Tensor) -> Tensor:
        """Sums over the data ranks; of the ranks that hold one model together, one that computes the loss counts."""
        if not self._reports_loss:
            sums.zero_()
        dist.all_reduce(sums)
        return sums

    def _set_training(self, mode: bool) -> None:
        for root in self._roots:
            root.train(mode)


def _decoder(root: nn.Module) -> Decoder:
    """The decoder, or this stage's part of it, within a root module."""
    decoder = root.decoder if isinstance(root, StageModule) else root
    assert isinstance(decoder, Decoder)
    return decoder


def _causal(root: nn.Module) -> nn.Module:
    """Hugging Face's model, or this stage's part of it, within a root module."""
    return _decoder(root).causal


def _own_stages(run: ResolvedRun, model: nn.Module, mesh: Mesh) -> list[StageLayers]:
    """The (virtual) pipeline stages that this rank holds."""
    return [stage for stage in pipeline_stages(run, model) if stage.index % run.topology.pp == mesh.coordinates["pp"]]
