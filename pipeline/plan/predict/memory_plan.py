"""Peak memory of a rank by phase and by kind, with its interval, by the formulas of `engines.sizes.memory`."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.sizes.communicators import communicator_bytes
from pipeline.engines.sizes.memory import KINDS, Bytes, host_memory, phases
from pipeline.plan.predict.host_plan import HostPlan, host_plan
from pipeline.plan.predict.interval import Interval
from pipeline.plan.predict.model_costs import ModelCosts
from pipeline.runtime.machines.machine import Machine

FORMULA_ERROR = 0.05
"""Relative error of the formulas against a step on fake tensors (tests/plan/fake_gpu/test_traffic_and_memory.py)."""

RESERVE = {False: (0.0, 0.05, 0.1), True: (0.13, 0.2, 0.26)}
"""Memory that torch's allocator reserves beyond the tensors, over the tensors: low, typical, high; True with tensor or
pipeline parallelism. From half of torchtitan's published peaks, which are reserved memory (docs/reference/planner.md).
The allocator frees what it does not use before it fails: only the upper end of the peak includes the reserve."""

LABELS = {"buffers": "communication buffers"}
"""Kind -> its label, where the label is another word."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of the pipeline rank that needs most.

    Attributes:
        pp_rank: pipeline rank that needs most.
        phases: phase -> kind -> bytes; "fragmentation", "context and NCCL" and on GPUs "communicators" (more of NCCL's)
            are kinds beside those of tensors.
        peak: bytes of the phase that needs most.
        phase: name of the phase that needs most.
        device: bytes of a device's memory.
        node: memory and disk that the ranks of a node need on its host.
        host: bytes of host memory that the rank needs for offload, else 0. On a CPU, `phases` counts them too.
        reserved: bytes that torch's allocator reserves on a GPU (`max_memory_reserved`): tensors and `RESERVE`.
    """

    pp_rank: int
    phases: dict[str, dict[str, float]]
    peak: Interval
    phase: str
    device: float
    node: HostPlan
    host: float = 0.0
    reserved: Interval | None = None

    @property
    def fits(self) -> bool:
        """Whether the typical peak fits a device, and the node's host has room for the offloaded data."""
        return self.peak.typical <= self.device and self.node.fits

    @property
    def verdict(self) -> str:
        """Whether the peak fits a device, in words."""
        if self.peak.high <= self.device:
            return "fits"
        if self.peak.typical <= self.device:
            return "fits, but for the upper end of the interval"
        return "does not fit" + (", but for the lower end of the interval" if self.peak.low <= self.device else "")


def with_margin(machine: Machine, margin: float) -> Machine:
    """Reduces each device's memory by the share `margin`, which proposed layouts then leave free."""
    memory = machine.memory.model_copy(update={"bytes": machine.memory.bytes * (1 - margin)})
    return machine.model_copy(update={"memory": memory})


def memory_plan(run: ResolvedRun, costs: ModelCosts, machine: Machine) -> MemoryPlan:
    """Predicts the memory of a run.

    Raises:
        ConfigError: the architecture does not support the layout.
    """
    footprint = costs.shares(run).footprint
    by_rank = [phases(run, footprint, pp_rank=rank, cpu=not machine.gpu) for rank in range(run.topology.pp)]
    worst = max(range(len(by_rank)), key=lambda rank: max(each.total for each in by_rank[rank].values()))
    shown = {name: _kinds(each, run, machine) for name, each in by_rank[worst].items()}
    phase = max(shown, key=lambda name: sum(shown[name].values()))
    host, node = host_memory(run, footprint, pp_rank=worst), host_plan(run, footprint, machine)
    most = by_rank[worst][phase]
    peak, reserved = _peak(most, run, machine), reserved_by(run, most.total) if machine.gpu else None
    return MemoryPlan(worst, shown, peak, phase, machine.memory.bytes, node, host, reserved)


def reserved_by(run: ResolvedRun, tensors: float) -> Interval:
    """Bytes that torch's allocator reserves for a peak of `tensors` bytes, with the formulas' error at both ends."""
    low, typical, high = RESERVE[run.topology.tp * run.topology.pp > 1]
    return Interval.of(*((1 + each) * tensors for each in (low - FORMULA_ERROR, typical, high + FORMULA_ERROR)))


def host_fits(run: ResolvedRun, costs: ModelCosts, machine: Machine) -> bool:
    """Whether a node's host has room for its ranks' offloaded data."""
    return host_plan(run, costs.shares(run).footprint, machine).fits


def typical_peak(run: ResolvedRun, costs: ModelCosts, machine: Machine) -> float:
    """The typical peak in bytes, without the rest of the plan: quicker than `memory_plan`."""
    footprint = costs.shares(run).footprint
    return max(
        _with_overhead(each, run, machine, end=1)
        for rank in range(run.topology.pp)
        for each in phases(run, footprint, pp_rank=rank, cpu=not machine.gpu).values()
    )


def _kinds(each: Bytes, run: ResolvedRun, machine: Machine) -> dict[str, float]:
    fragments = machine.overhead.fragmentation[1] * (each.activations + each.logits)
    kinds = {LABELS.get(kind, kind): float(getattr(each, kind)) for kind in KINDS}
    more = {"communicators": size} if (size := _communicators(run, machine, end=1)) else {}
    return {**kinds, "fragmentation": fragments, "context and NCCL": machine.overhead.bytes[1], **more}


def _peak(each: Bytes, run: ResolvedRun, machine: Machine) -> Interval:
    low, typical, high = (_with_overhead(each, run, machine, end=end) for end in range(3))
    most = high + FORMULA_ERROR * each.total
    if machine.gpu:
        rest = machine.overhead.bytes[2] + _communicators(run, machine, end=2)
        most = max(most, reserved_by(run, each.total).high + rest)
    return Interval(low - FORMULA_ERROR * each.total, typical, most)


def _with_overhead(each: Bytes, run: ResolvedRun, machine: Machine, *, end: int) -> float:
    overhead = machine.overhead
    fragments = overhead.fragmentation[end] * (each.activations + each.logits)
    return each.total + fragments + overhead.bytes[end] + _communicators(run, machine, end=end)


def _communicators(run: ResolvedRun, machine: Machine, *, end: int) -> float:
    return communicator_bytes(run, per_node=machine.devices_per_node, end=end) if machine.gpu else 0.0
