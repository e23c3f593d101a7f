"""The time of a training step at given rates, and where it goes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from pipeline.config.rules import ResolvedRun
from pipeline.planner.communication import transfers
from pipeline.planner.model_costs import ModelCosts
from pipeline.planner.rates import Rates
from pipeline.planner.step_time import PipelineTime, collective_seconds, pipeline_step
from pipeline.planner.work import Pass, Work, work_of
from pipeline.run.checkpoint_interval import make_interval
from pipeline.run.checkpoint_timer import minutes_of

LOADER_TOKENS_PER_S = 169_000 * 2048
"""Tokens that the loader makes per second on one core (benchmarks/README.md, the loader's own work)."""

ADAM_HOST_BYTES = 32
"""Bytes per parameter that an AdamW update reads and writes in the host's memory, with fp32 states."""

HOST_MEMORY_SHARE = 0.4
"""Bandwidth of the host's memory for one device, over that of its link: assumed (two sockets of 12 DDR5 channels have
about 0.8 TB/s for 8 devices with PCIe 5, of which half is reached)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step of the slowest rank.

    Attributes:
        products: matrix products and attention.
        kernels: other kernels, bound by memory bandwidth.
        tensor_parallel: collectives of tensor parallelism, for which layers wait.
        context_parallel: the same, of context parallelism.
        data_parallel: gathers of weights and reductions of gradients that no kernel hides.
        bubble: of the pipeline.
        optimizer: the update, and the addition of gradients.
        offload: transfers to the host and the update there.
        data: for which the loader keeps the step waiting.
        checkpoint: for which training waits, spread over the steps between two checkpoints.
    """

    products: float = 0.0
    kernels: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    data_parallel: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    data: float = 0.0
    checkpoint: float = 0.0

    @property
    def total(self) -> float:
        """Of the step."""
        return float(sum(getattr(self, part.name) for part in fields(self)))

    def split(self) -> dict[str, float]:
        """Seconds by what a step is divided into at first sight."""
        return {
            "compute": self.products + self.kernels,
            "exposed communication": self.tensor_parallel + self.context_parallel + self.data_parallel,
            "pipeline bubble": self.bubble,
            "optimizer": self.optimizer + self.offload,
            "data": self.data,
            "checkpoint": self.checkpoint,
        }


@dataclass(frozen=True)
class _RankTime:
    """Seconds of one rank: of a micro-batch, and of a step's communication."""

    products: float
    kernels: float
    forward: float
    backward: float
    tensor: float
    context: float
    weights: float
    gradients: float
    message: float
    work: Work


def works_of(run: ResolvedRun, costs: ModelCosts) -> list[Work]:
    """The work of every rank of the pipeline.

    Raises:
        ConfigError: see `ModelCosts.shares`.
    """
    return [work_of(run, costs, rank) for rank in range(run.topology.pp)]


def step_time(run: ResolvedRun, works: list[Work], rates: Rates) -> StepTime:
    """The time of a step.

    Args:
        run: the resolved config.
        works: of every rank of its pipeline.
        rates: of the machine.
    """
    ranks = [_rank_time(work, rates) for work in works]
    slowest = max(ranks, key=lambda rank: rank.forward + rank.backward)
    count = run.batch.accumulation
    inside = (slowest.tensor + slowest.context) / count
    passes = pipeline_step(
        run.config.parallel.schedule,
        run.topology.pp,
        count,
        slowest.forward + inside / 3,
        slowest.backward + inside * 2 / 3,
        slowest.message,
        virtual_stages=run.virtual_stages,
    )
    computing = count * (slowest.forward + slowest.backward)
    step = StepTime(
        products=count * slowest.products,
        kernels=count * slowest.kernels,
        tensor_parallel=slowest.tensor,
        context_parallel=slowest.context,
        data_parallel=max(_exposed(run, rank, rates, passes) for rank in ranks),
        bubble=passes.bubble,
        optimizer=max(rank.work.update_bytes for rank in ranks) / rates.memory,
        offload=_offload(run, slowest.work, rates),
        data=max(0.0, run.batch.micro * count * run.batch.sequence_length / LOADER_TOKENS_PER_S - computing),
    )
    return replace(step, checkpoint=_checkpoint(run, works, rates, step_s=step.total))


def _rank_time(work: Work, rates: Rates) -> _RankTime:
    sums = dict.fromkeys(("tensor", "context", "weights", "gradients", "pipeline"), 0.0)
    message = 0.0
    for each in transfers(work.layout):
        seconds = collective_seconds(each.kind, each.bytes, each.ranks, rates.topology, each.count)
        sums[each.purpose] += seconds
        if each.purpose == "pipeline":
            message = seconds / each.count
    forward, backward = _products(work.forward, rates), _products(work.backward, rates)
    kernels = [each.kernel_bytes / rates.memory for each in (work.forward, work.backward)]
    return _RankTime(
        products=forward + backward,
        kernels=sum(kernels),
        forward=forward + kernels[0],
        backward=backward + kernels[1],
        tensor=sums["tensor"],
        context=sums["context"],
        weights=sums["weights"],
        gradients=sums["gradients"],
        message=message,
        work=work,
    )


def _products(each: Pass, rates: Rates) -> float:
    return each.products / rates.products + each.attention / rates.attention


def _exposed(run: ResolvedRun, rank: _RankTime, rates: Rates, passes: PipelineTime) -> float:
    """Communication of data parallelism that runs beside no kernel.

    Stage 3 gathers and reduces in all passes; the others gather weights beside the first forward pass (FSDP2) or
    after the update (DeepSpeed), and reduce gradients beside the last backward pass.
    """
    stage, deepspeed = run.config.zero_optimization.stage, run.config.engine == "deepspeed"
    count = run.batch.accumulation
    given = run.config.zero_optimization.overlap_comm
    overlaps = not deepspeed or (stage == 3 if given is None else given)
    share = rates.overlap if overlaps else 0.0
    if stage == 3:
        return _unhidden(rank.weights + rank.gradients, beside=passes.seconds - passes.bubble, share=share)
    reductions = count if stage == 2 and run.topology.pp == 1 else 1
    return _unhidden(rank.gradients, beside=reductions * rank.backward, share=share) + _unhidden(
        rank.weights, beside=rank.forward, share=0.0 if deepspeed else share
    )


def _unhidden(seconds: float, *, beside: float, share: float) -> float:
    """What is left of some communication when the share that can is hidden behind so many seconds of kernels."""
    return seconds - min(seconds * share, beside)


def _offload(run: ResolvedRun, work: Work, rates: Rates) -> float:
    """Gradients to the host, the update there, weights back; weights of `offload_param` for every pass."""
    section, rank = run.config.zero_optimization, work.layout.rank
    if run.config.engine != "deepspeed":
        return 0.0
    shards = run.topology.dp * run.topology.cp
    mine, size = rank.parameters / shards, work.layout.size
    seconds = 0.0
    if section.offload_optimizer.device != "none":
        moved = mine * (4 + size)
        updated = mine * ADAM_HOST_BYTES / (HOST_MEMORY_SHARE * rates.host.bandwidth)
        seconds += rates.host.seconds(moved) + updated
    if section.offload_param.device != "none":
        seconds += rates.host.seconds(2 * run.batch.accumulation * mine * size)
    return seconds


def _checkpoint(run: ResolvedRun, works: list[Work], rates: Rates, *, step_s: float) -> float:
    """Seconds per step: the copy to the host; of a checkpoint that training waits for, writing it too.

    With "auto", by the interval that a run would take after a save of this length.
    """
    section = run.config.run
    state = max(work.layout.rank.parameters for work in works) * run.config.optimizer.kind.bytes_per_parameter
    mine = state / (run.topology.dp * run.topology.cp)
    written = mine * min(run.topology.world_size, rates.topology.devices_per_node) / rates.storage
    seconds = rates.host.seconds(mine) + (0.0 if section.async_checkpoints else written)
    if section.checkpoint_every == "auto":
        nodes = math.ceil(run.topology.world_size / rates.topology.devices_per_node)
        interval = make_interval(section, nodes=nodes)
        assert interval is not None
        interval.measured(blocking_s=seconds, save_s=written if section.async_checkpoints else 0.0)
        return seconds * step_s / interval.period_s
    if section.checkpoint_every:
        return seconds / section.checkpoint_every
    minutes = minutes_of(section)
    return seconds * (step_s / (60 * minutes) if minutes else 1 / run.steps)
