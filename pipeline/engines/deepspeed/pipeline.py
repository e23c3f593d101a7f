"""DeepSpeed's pipeline behind the `Engine` protocol: pp x dp x cp x tp, with ZeRO 0 or 1.

`PipelineModule` gets one module per stage, balanced by cost like in the native engine, and DeepSpeed runs its 1F1B
schedule over them. Only hidden states travel: every stage of a data place has the same micro-batches, and takes the one
whose turn it is. Ranks are laid out as in `topology`: pp slowest, then data (dp x cp), tp fastest.
Seen with deepspeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import islice
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.schedule import OptimizerStep, TrainSchedule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from pipeline.config.rules import ResolvedRun
from pipeline.data.loader import IGNORE, MicroBatch, StepBatch
from pipeline.engines.base import Gate, Objective, StepResult, Sums, always
from pipeline.engines.common import decayed_names
from pipeline.engines.deepspeed.base import DeepSpeedBase
from pipeline.engines.deepspeed.config import deepspeed_config
from pipeline.engines.deepspeed.parts import make_optimizer, make_part
from pipeline.engines.deepspeed.replicated import Replicated
from pipeline.engines.deepspeed.state import reset_moments
from pipeline.engines.objective import CrossEntropy
from pipeline.models.values import ParameterValues
from pipeline.parallel.assemble import Assembled, stages_of
from pipeline.parallel.decoder import Decoder
from pipeline.parallel.mesh import Mesh, ends_group
from pipeline.parallel.stages import is_tied
from pipeline.topology import Topology

_EVALUATED_AT_ONCE = 32
"""Micro-batches per filling of the pipeline in an evaluation; a bubble of pp - 1 among them."""


class DeepSpeedPipeline(DeepSpeedBase):
    """One model, cut into pipeline stages. The process group is open.

    Args:
        run: the resolved config, with pp above 1 and ZeRO 0 or 1.
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
        super().__init__(run, objective, device=device, mesh=mesh)
        place = mesh.place
        stage = stages_of(run, model)[place["pp"]]
        self._assembled = make_part(run, model, values, self._mesh, device=device, stage=stage)
        self._turns = _StageModule(self._assembled.decoder, len(objective.parts), device)
        self._ends = ends_group(run.topology) if is_tied(model) else None
        module = _Stages(run.topology, self._turns, self._assembled, number=place["pp"], ends=self._ends)
        optimizer = make_optimizer(
            run,
            self._assembled,
            decayed_names(model),
            holders=module.mpu().get_model_parallel_group(),
            counts_whole=place["tp"] == 0,
            permits=self._permits,
        )
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=deepspeed_config(run))
        module.optimizer = self._engine.optimizer
        reset_moments(self._engine.optimizer)

    def train_step(self, step: StepBatch, *, lr: float, allow: Gate = always) -> StepResult:
        """See `Engine.train_step`."""
        engine = self._engine
        # DeepSpeed divides the loss by the number of micro-batches
        factor = self._begin(step, lr, allow) * len(step.micro_batches)
        batches = [micro.to(self._device) for micro in step.micro_batches]
        self._turns.begin(batches, self._objective, factor)
        engine.module.train()
        engine.total_loss, engine._compute_loss = None, True
        engine.set_dataiterator(_pairs(batches))
        engine._exec_schedule(_WithoutStep(len(batches), engine.num_stages, engine.stage_id))
        means = self._means(self._turns.sums, step)
        engine._exec_optimizer_step()
        return self._result(step, means)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Sums:
        """See `Engine.evaluate`."""
        nats, targets, rest = torch.zeros((), device=self._device), 0, iter(batches)
        self._engine.reset_activation_shape()  # these batches may have another shape than those trained on
        while part := [micro.to(self._device) for micro in islice(rest, _EVALUATED_AT_ONCE)]:
            self._turns.begin(part, CrossEntropy(), 1.0)
            self._engine.eval_batch(
                _pairs(part), compute_loss=False, reduce_output=None, bcast_loss=False, num_micro_batches=len(part)
            )
            nats += self._turns.sums[0]
            targets += sum(int((micro.labels != IGNORE).sum()) for micro in part)
        self._engine.reset_activation_shape()
        return self._evaluated(nats, targets)


def _pairs(batches: Sequence[MicroBatch]) -> Iterator[tuple[Tensor, Tensor]]:
    """What DeepSpeed loads on the first stage (ids) and on the last (labels, which the module has already)."""
    return iter([(batch.input_ids, batch.labels) for batch in batches])


class _WithoutStep(TrainSchedule):  # type: ignore[misc]
    """DeepSpeed's 1F1B schedule up to the reduced gradients: the update comes when the loss is known on every rank."""

    def steps(self) -> Iterator[list[Any]]:
        """The instructions of every tick."""
        for commands in super().steps():
            yield [command for command in commands if not isinstance(command, OptimizerStep)]


class _StageModule(nn.Module):
    """One stage, fed with one step's micro-batches in the order of their forward passes.

    Args:
        decoder: the stage.
        parts: how many parts the objective reports.
        device: of this rank.

    Attributes:
        sums: of the loss and its parts, over the micro-batches so far; on the last stage.
    """

    def __init__(self, decoder: Decoder, parts: int, device: torch.device) -> None:
        super().__init__()
        self.decoder, self._parts, self._device = decoder, parts, device

    def begin(self, batches: Sequence[MicroBatch], objective: Objective, factor: float) -> None:
        """Takes what the coming forward passes are about; losses are handed on times `factor`."""
        self._coming, self._objective, self._factor = iter(batches), objective, factor
        self.sums = torch.zeros(1 + len(objective.parts), device=self._device)

    def forward(self, inputs: Tensor) -> Tensor:
        """Ids [B, T] or hidden states in, hidden states or the scalar loss out."""
        out = self.decoder(inputs, next(self._coming), self._objective)
        if not self.decoder.form.last:
            hidden: Tensor = out[0]
            return hidden
        self.sums += torch.stack([each.detach() for each in out])
        loss: Tensor = out[0] * self._factor
        return loss


class _Stages(PipelineModule):  # type: ignore[misc]
    """DeepSpeed's view of the pipeline, of which this rank builds only its own stage.

    Args:
        topology: sizes of the axes.
        own: this rank's stage.
        assembled: what it is made of.
        number: of this stage.
        ends: the ranks that hold a parameter with this one; None where there is none.

    Attributes:
        optimizer: DeepSpeed's, once there is one; it knows where gradients are.
    """

    optimizer: Any = None

    def __init__(
        self,
        topology: Topology,
        own: _StageModule,
        assembled: Assembled,
        *,
        number: int,
        ends: dist.ProcessGroup | None,
    ) -> None:
        axes = PipeModelDataParallelTopology(num_pp=topology.pp, num_mp=topology.tp, num_dp=topology.dp * topology.cp)
        layers = [own if stage == number else LayerSpec(nn.Identity) for stage in range(topology.pp)]
        with redirect_stdout(StringIO()):  # it prints its layers
            super().__init__(layers, topology=axes, partition_method="uniform")
        self._assembled = assembled
        self._ends = ends
        named = assembled.decoder.named()
        for name in assembled.shared if number > 0 else ():
            named[name].ds_pipe_replicated = True  # type: ignore[attr-defined]  # the first stage counts its gradient

    def get_tied_weights_and_groups(self) -> list[Any]:
        """Sums the gradients of what two stages hold; DeepSpeed asks at the right moment, and then has nothing to do.

        Its own way looks for `grad`, which is None where gradients are added up in fp32 beside the model's dtype.
        """
        for name in sorted(self._assembled.shared):
            gradient = self._gradient(name)
            if gradient is not None:
                dist.all_reduce(gradient, group=self._ends)
        return []

    def _gradient(self, name: str) -> Tensor | None:
        if isinstance(self.optimizer, Replicated):
            return self.optimizer.gradient(name)
        weight = self._assembled.decoder.named()[name]
        places = (getattr(weight, place, None) for place in ("_hp_grad", "grad_accum", "grad"))
        return next((gradient for gradient in places if gradient is not None), None)
