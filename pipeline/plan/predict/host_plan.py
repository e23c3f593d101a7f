"""Memory and local disk that a run needs on a node's host: offload, checkpoints in memory, processes of the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.deepspeed.defaults import DEFAULTS
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.deepspeed import OffloadOptimizerSection, OffloadParamSection
from pipeline.engines.parallel.rank_model import Footprint, RankModel
from pipeline.engines.sizes.memory import host_memory
from pipeline.runtime.machines.machine import Machine

PROCESS_BYTES = 4e9
"""Host memory of a rank's process on a GPU: CUDA's context, NCCL's buffers, torch and transformers. Assumed."""


@dataclass(frozen=True)
class HostPlan:
    """Memory and disk that a node's ranks need on its host, if each needs as much as the largest.

    Attributes:
        memory: kind -> bytes of host memory.
        disk: bytes on local NVMe disks.
        memory_bytes: memory of the host; None if the machine's file does not give it.
        disk_bytes: capacity of its local disks; None if the machine's file does not give it.
        checkpoints: bytes of the checkpoints that `run.dir` holds at once, of all ranks.
    """

    memory: dict[str, float]
    disk: float
    memory_bytes: float | None
    disk_bytes: float | None
    checkpoints: float = 0.0

    @property
    def crowded(self) -> bool:
        """Whether the local disks, if their capacity is known, are too small for the checkpoints beside the states."""
        return self.disk_bytes is not None and self.disk + self.checkpoints > self.disk_bytes

    @property
    def fits(self) -> bool:
        """Whether memory and disks fit; sizes that the machine's file lacks are not checked."""
        used = sum(self.memory.values())
        return used <= (self.memory_bytes or used) and self.disk <= (self.disk_bytes or self.disk)


def host_plan(run: ResolvedRun, footprint: Footprint, machine: Machine) -> HostPlan:
    """Host memory and disk of the node whose ranks need most; nothing on a CPU, whose ranks use the host's memory.

    Not counted: the page cache, which the kernel frees on demand, and a loader's batches of some MB.
    """
    if not machine.gpu:
        return HostPlan({}, 0.0, None, None)
    ranks = min(run.topology.world_size, machine.devices_per_node)
    stages = range(run.topology.pp)
    saved = max(checkpoint_bytes(run, footprint.ranks[stage]) for stage in stages)
    kinds = {
        "offload": max(host_memory(run, footprint, pp_rank=stage) for stage in stages),
        "buffers of offload to NVMe": max(_buffers(run, footprint.ranks[stage]) for stage in stages),
        "asynchronous checkpoints": saved if run.config.run.async_checkpoints else 0.0,
        "in-memory checkpoints": 2 * saved if run.config.run.in_memory_checkpoints else 0.0,
        "processes": PROCESS_BYTES,
    }
    disk = max(nvme_states(run, footprint.ranks[stage]) for stage in stages)
    host = machine.host
    used = {kind: ranks * size for kind, size in kinds.items() if size}
    return HostPlan(used, ranks * disk, host.memory_bytes, host.disk_bytes, kept_bytes(run, footprint))


def kept_bytes(run: ResolvedRun, footprint: Footprint) -> float:
    """Bytes of the checkpoints that a run keeps, and of the one that is being written, without the moving average."""
    section, stage_ranks = run.config.run, run.topology.world_size // run.topology.pp
    lasting = 0 if section.keep_every is None else run.steps // section.keep_every
    kept = min(section.keep_checkpoints, run.steps) + 1 + lasting
    return kept * stage_ranks * sum(checkpoint_bytes(run, rank) for rank in footprint.ranks)


def checkpoint_bytes(run: ResolvedRun, rank: RankModel) -> float:
    """Bytes of a checkpoint that a rank writes, if ranks with equal shards divide the writes among them."""
    kind, topology = run.config.state_kind, run.topology
    rest, experts = (kind.state_bytes(parameters=part.parameters, matrices=part.matrices) for part in rank.apart())
    return rest / (topology.dp * topology.cp) + experts / topology.edp


def nvme_states(run: ResolvedRun, rank: RankModel) -> float:
    """Bytes that a rank keeps on NVMe: master weights, optimizer states, fp32 gradients, and shards of weights."""
    optimizer, weights = _to_nvme(run)
    shard = rank.parameters / (run.topology.dp * run.topology.cp)
    states = checkpoint_bytes(run, rank) + 4 * shard if optimizer else 0.0
    return states + (2 * shard if weights else 0.0)


def _to_nvme(run: ResolvedRun) -> tuple[OffloadOptimizerSection | None, OffloadParamSection | None]:
    zero = run.config.zero_optimization
    if run.config.engine != "deepspeed":
        return None, None
    optimizer = zero.offload_optimizer if zero.offload_optimizer.device == "nvme" else None
    return optimizer, zero.offload_param if zero.offload_param.device == "nvme" else None


def _buffers(run: ResolvedRun, rank: RankModel) -> float:
    """Bytes of page-locked buffers through which DeepSpeed swaps a rank's tensors (0.19.8, `runtime/swap_tensor`)."""
    optimizer, weights = _to_nvme(run)
    size, shard = 0.0, rank.parameters / (run.topology.dp * run.topology.cp)
    if optimizer is not None:
        group = _given(run.config.zero_optimization.sub_group_size, "sub_group_size")
        size += 4 * _given(optimizer.buffer_count, "offload_optimizer.buffer_count") * min(shard, group)
    if weights is not None:
        buffers = _given(weights.buffer_count, "offload_param.buffer_count")
        each = _given(weights.buffer_size, "offload_param.buffer_size")
        size += 2 * (buffers * each + min(shard, _given(weights.max_in_cpu, "offload_param.max_in_cpu")))
    return size


def _given(value: int | None, key: str) -> int:
    """The value of a key of `zero_optimization`, or DeepSpeed's default."""
    return int(DEFAULTS[f"zero_optimization.{key}"]) if value is None else value
