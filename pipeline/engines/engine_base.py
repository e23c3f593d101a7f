"""Code that the engines share; the reference engine, against which they are checked, uses none of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shard_table import State
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.memory.shard_files import ShardFiles
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.optimizers import OptimizerKind
from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.engines.base import EvaluationSums, Objective, Replica, StepMeasure, TrainsStepByStep
from pipeline.engines.common import matrices_of, samples_text, update_scales
from pipeline.engines.loss_scale import LossScaler
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.optim.qk_clip import make_qk_clip
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.expert_balance import make_balancer
from pipeline.engines.parallel.mesh import Mesh, tied_weights_group
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.engines.parallel.stages import is_tied, shared_between_stages
from pipeline.models.construction.initial_values import ParameterValues

NamedState = dict[str, NamedShard | Tensor]


class EngineBase(TrainsStepByStep):
    """An `Engine` without `begin_step`. A subclass defines `_build`, `_local_state`, and `_score` or `_scores`.

    Args:
        run: the resolved config.
        model: the full model, on meta, as `build_meta` made it.
        values: initial values of its parameters.
        objective: the loss.
        device: this rank's device.
        mesh: this rank's coordinates and process groups; None for one process.

    Attributes:
        decoders: this rank's parts of the model, one per (virtual) pipeline stage.
    """

    decoders: list[Decoder]

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
        config, topology = run.config, run.topology
        self.rank = 0 if mesh is None else mesh.rank
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._objective, self._device, self._mesh = objective, device, mesh
        self._kind, self._scaler = config.state_kind, LossScaler(config.fp16)
        self.deferred = device.type == "cuda" and not self._scaler.enabled and not samples_text(config)
        self._balancer = make_balancer(config.moe, model, device=device, exchanged=topology.ep > 1)
        self._qk_clip = make_qk_clip(config.optimizer, model, device=device, mesh=mesh)
        measures: tuple[StepMeasure | None, ...] = (self._balancer, self._qk_clip)
        self._measures = [each for each in measures if each is not None]
        self._matrices = matrices_of(model, config.optimizer)
        self._update_scales = update_scales(model, config.model, config.optimizer)
        tied = topology.pp > 1 and (is_tied(model) or bool(shared_between_stages(model, pipeline_stages(run, model))))
        self._tied_group = tied_weights_group(run) if tied else None
        coordinates = topology.coordinates(self.rank)
        # every tp rank of the last stage has the same loss; one rank counts it
        self._reports_loss = coordinates["tp"] == 0 and coordinates["pp"] == run.rank_of_stage(-1)
        self._build(run, model, values)
        if self._qk_clip is not None:
            for decoder in self.decoders:
                self._qk_clip.attach(decoder.causal)
        self._set_training(True)

    def _build(self, run: ResolvedRun, model: nn.Module, values: ParameterValues) -> None:
        """Builds `decoders` and the optimizer."""
        raise NotImplementedError

    def replicas(self) -> Iterator[Replica]:
        """Implements `Engine.replicas`: one process has none."""
        return iter(())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> EvaluationSums:
        """Implements `Engine.evaluate`."""
        nats, targets = torch.zeros((), device=self._device), 0
        for score, scored in self._scores(batches, CrossEntropy()):
            nats = nats + score
            targets += sum(int((micro.labels != IGNORE).sum()) for micro in scored)
        sums = torch.stack([nats.double(), torch.tensor(targets, device=self._device).double()])
        if self._mesh is not None:
            if not self._reports_loss:
                sums.zero_()
            dist.all_reduce(sums)
        total, count = sums.tolist()
        return EvaluationSums(total, int(count))

    @torch.no_grad()
    def forward_passes(self, batches: Iterable[MicroBatch], objective: Objective) -> None:
        """Implements `Engine.forward_passes`."""
        for _ in self._scores(batches, objective):
            pass

    def _scores(self, batches: Iterable[MicroBatch], objective: Objective) -> Iterator[tuple[Tensor, list[MicroBatch]]]:
        """Yields sums of the objective in evaluation mode, each with its micro-batches."""
        self._set_training(False)
        for micro in batches:
            yield self._score(micro.to(self._device), objective), [micro]
        self._set_training(True)

    def _score(self, batch: MicroBatch, objective: Objective) -> Tensor:
        """Returns the objective summed over a batch: scalar, in the dtype of an evaluation's sums."""
        raise NotImplementedError

    def state(self) -> State:
        """Implements `Engine.state`."""
        return self._state()[0]

    def load(self, directory: Path, *, fresh_optimizer: bool = False, files: ShardFiles | None = None) -> None:
        """Implements `Engine.load`."""
        with self.edit_state() as state:
            named_state.read(state, directory, fresh_optimizer=fresh_optimizer, files=files)

    @contextmanager
    def edit_state(self) -> Iterator[State]:
        """Implements `Engine.edit_state`."""
        state, restore = self._state()
        yield state
        self._scaler.load_state_dict(state)
        if self._balancer is not None:
            self._balancer.load_state_dict(state)
        restore()

    def _state(self) -> tuple[NamedState, Callable[[], None]]:
        """Returns the named state, and a function to call after the state was changed."""
        state, restore = self._local_state()
        if self._balancer is not None:
            state.update(self._balancer.state_dict())
        for decoder in self.decoders:
            state.update(named_state.buffer_state(decoder.causal))
        state.update(self._scaler.state_dict())
        return state, restore

    def _kind_of(self, name: str) -> OptimizerKind:
        """Returns the optimizer's kind for a parameter."""
        return self._kind.of(matrix=name in self._matrices)

    def _set_training(self, mode: bool) -> None:
        for decoder in self.decoders:
            decoder.train(mode)

    def _local_state(self) -> tuple[NamedState, Callable[[], None]]:
        """Returns the same as `_state`, for weights and optimizer states only."""
        raise NotImplementedError
