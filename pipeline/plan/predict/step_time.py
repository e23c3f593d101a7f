"""The time of a training step at given rates, by part."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.plan.predict.host_plan import checkpoint_bytes, nvme_states
from pipeline.plan.predict.model_costs import ModelCosts
from pipeline.plan.predict.rank_time import rank_time
from pipeline.plan.predict.rates import Rates
from pipeline.plan.predict.step_model import StepModel
from pipeline.plan.predict.work import Work, work_of
from pipeline.run.checkpoint_interval import make_interval
from pipeline.run.checkpoint_timer import minutes_of

LOADER_TOKENS_PER_S = 169_000 * 2048
"""Tokens that the loader makes per second on one core (benchmarks/README.md, the loader's own work)."""

ADAM_HOST_BYTES = 32
"""Bytes per parameter that an AdamW update reads and writes in the host's memory, with fp32 states."""

HOST_MEMORY_SHARE = 0.4
"""Memory bandwidth of the host for one device, over the bandwidth of the device's link. Assumed: two sockets of 12 DDR5
channels have about 0.8 TB/s for 8 devices with PCIe 5, of which half is reached."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step on the slowest rank.

    Attributes:
        products: matrix products and attention.
        kernels: other kernels, bound by memory bandwidth; on a CPU also their dispatch by the host.
        tensor_parallel: collectives of tensor parallelism, for which layers wait.
        context_parallel: collectives of context parallelism, for which layers wait.
        expert_parallel: collectives of expert parallelism, for which layers wait.
        data_parallel: gathers of weights and reductions of gradients that no kernel hides.
        bubble: bubble of the pipeline.
        optimizer: the update, including exchange and orthogonalization of whole matrices, and the addition of
            gradients.
        offload: transfers to the host and the update there.
        data: wait for the data loader.
        checkpoint: wait for a checkpoint, spread over the steps between two checkpoints.
    """

    products: float = 0.0
    kernels: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    data_parallel: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    data: float = 0.0
    checkpoint: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return float(sum(getattr(self, part.name) for part in fields(self)))

    def split(self) -> dict[str, float]:
        """Seconds of the step, summed up in six parts."""
        return {
            "compute": self.products + self.kernels,
            "exposed communication": self.tensor_parallel
            + self.context_parallel
            + self.expert_parallel
            + self.data_parallel,
            "pipeline bubble": self.bubble,
            "optimizer": self.optimizer + self.offload,
            "data": self.data,
            "checkpoint": self.checkpoint,
        }


def works_of(run: ResolvedRun, costs: ModelCosts) -> list[Work]:
    """The work of every rank of the pipeline.

    Raises:
        ConfigError: the architecture does not support the layout.
    """
    return [work_of(run, costs, rank) for rank in range(run.topology.pp)]


def step_time(run: ResolvedRun, works: list[Work], rates: Rates, *, model: StepModel) -> StepTime:
    """Computes the time of a step.

    Args:
        run: the resolved config.
        works: work of every pipeline rank.
        rates: rates of the machine.
        model: model of collectives, pipeline and overlap: SIMULATED for display, CLOSED for a search.
    """
    ranks = [rank_time(work, rates, model.collective) for work in works]
    slowest = max(ranks, key=lambda rank: rank.busy)
    count = run.batch.accumulation
    computing = count * (slowest.forward + slowest.backward)
    step = StepTime(
        products=count * slowest.products,
        kernels=count * slowest.kernels,
        tensor_parallel=slowest.tensor,
        context_parallel=slowest.context,
        expert_parallel=slowest.experts,
        data_parallel=max(model.exposed(run, rank, rates) for rank in ranks),
        bubble=model.pipeline(run, ranks, rates).bubble,
        optimizer=max(rank.work.update_bytes / rates.memory + rank.matrices for rank in ranks),
        offload=_offload(run, slowest.work, rates),
        data=max(0.0, run.batch.micro * count * run.batch.sequence_length / LOADER_TOKENS_PER_S - computing),
    )
    return replace(step, checkpoint=_checkpoint(run, works, rates, step_s=step.total))


def _offload(run: ResolvedRun, work: Work, rates: Rates) -> float:
    """Seconds of gradients to the host, the update there, weights back, and `offload_param`'s weights in every pass.

    On NVMe, master weights, optimizer states and gradients are read and written once per step. Weights are read for
    every pass and written once. All ranks of a node share the disks. Swaps count as not overlapped, as with DeepSpeed's
    defaults of `pipeline_read` and `pipeline_write`.
    """
    section, rank = run.config.zero_optimization, work.layout.rank
    if run.config.engine != "deepspeed":
        return 0.0
    shards = run.topology.dp * run.topology.cp
    mine, size = rank.parameters / shards, work.layout.size
    seconds = 0.0
    if section.offload_optimizer.device != "none":
        moved = mine * (4 + size) + _accumulated(run, rank.parameters, mine, size)
        updated = mine * ADAM_HOST_BYTES / (HOST_MEMORY_SHARE * rates.host.bandwidth)
        seconds += rates.host.seconds(moved) + updated
    if section.offload_param.device != "none":
        seconds += rates.host.seconds(2 * run.batch.accumulation * mine * size)
    ranks = min(run.topology.world_size, rates.topology.devices_per_node)
    states = nvme_states(run, rank)
    weights = mine * size if section.offload_param.device == "nvme" else 0.0
    read = states + (2 * run.batch.accumulation - 1) * weights
    return seconds + ranks * (read / rates.disk_read + states / rates.disk_write)


def _accumulated(run: ResolvedRun, parameters: float, mine: float, size: float) -> float:
    """Bytes copied to add up gradients over micro-batches, which DeepSpeed does in the host's memory.

    At stage 3 each micro-batch copies this rank's partition to the host and back, in the dtype of the sums. Below stage
    3 it copies the gradients of all parameters, in the passes' dtype; from the second micro-batch on, the sums are
    copied back before that (DeepSpeed 0.19.8, stage3.py: `partition_grads`; stage_1_and_2.py:
    `async_accumulate_grad_in_cpu_via_gpu`).
    """
    count = run.batch.accumulation
    if run.config.zero_optimization.stage == 3:
        return 2 * count * mine * (size if run.config.data_types.grad_accum_dtype == "bf16" else 4)
    return (2 * count - 1) * parameters * size if count > 1 else 0.0


def _checkpoint(run: ResolvedRun, works: list[Work], rates: Rates, *, step_s: float) -> float:
    """Seconds per step for a checkpoint's copy to the host and, where training waits for it, its write.

    The interval "auto" is the one that a run would choose after a save of this length.
    """
    section = run.config.run
    mine = max(checkpoint_bytes(run, work.layout.rank) for work in works)
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
