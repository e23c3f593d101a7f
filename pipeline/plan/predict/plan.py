"""A plan: memory and time of a run with their intervals, and its bottleneck."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.plan.predict.interval import Interval
from pipeline.plan.predict.memory_plan import MemoryPlan, memory_plan
from pipeline.plan.predict.model_costs import ModelCosts
from pipeline.plan.predict.rates import HIGH, LOW, TYPICAL, Rates, TypicalProduct, dtype_of, rates_of
from pipeline.plan.predict.simulated_step import SIMULATED
from pipeline.plan.predict.step_model import StepModel
from pipeline.plan.predict.step_time import StepTime, step_time, works_of
from pipeline.runtime.machines.machine import Machine
from pipeline.runtime.metrics.mfu import mfu

DAY = 86_400.0

CONSTRAINTS = {
    "products": "compute: matrix products and attention",
    "kernels": "memory bandwidth: kernels other than matrix products",
    "tensor_parallel": "communication of tensor parallelism, for which layers wait",
    "context_parallel": "communication of context parallelism, for which attention waits",
    "expert_parallel": "communication of expert parallelism, for which layers wait: rows to their experts and back",
    "data_parallel": "communication of data parallelism that no kernel hides: weights gathered, gradients reduced",
    "bubble": "the pipeline's bubble",
    "optimizer": "memory bandwidth: the optimizer's update and the addition of gradients (Muon: its products, too)",
    "offload": "the link to the host and the update there (offload)",
    "data": "the data loader",
    "checkpoint": "checkpoints",
}
"""Part of a step's time -> bottleneck of a run in which that part is the longest."""


@dataclass(frozen=True)
class Plan:
    """Memory and time of a run.

    Attributes:
        memory: memory of the rank that needs most.
        step: seconds of a step by part (see `StepTime`).
        split: seconds of a step, summed up in fewer parts.
        step_s: seconds of a step.
        tokens: training tokens of the whole run.
        tokens_per_s: tokens per second, all ranks together.
        mfu: model FLOPs utilization: 6N + 12Lhs over the dense peak of the run's dtype (for fp8, of bf16); None where
            the model's FLOPs are unknown.
        days: days of the run, without failures and evaluation.
        gpu_hours: GPU-hours of all devices, without failures and evaluation.
        constraint: bottleneck: a key of `CONSTRAINTS`, or "memory".
    """

    memory: MemoryPlan
    step: dict[str, Interval]
    split: dict[str, Interval]
    step_s: Interval
    tokens: int
    tokens_per_s: Interval
    mfu: Interval | None
    days: Interval
    gpu_hours: Interval
    constraint: str

    @property
    def binding(self) -> str:
        """The binding constraint in words."""
        if self.constraint == "memory":
            on_device = self.memory.peak.typical > self.memory.device
            less = "a rank needs more than a device has" if on_device else "its ranks need more than a node's host has"
            return f"memory: {less}"
        share = self.step[self.constraint].typical / self.step_s.typical
        return f"{CONSTRAINTS[self.constraint]} ({share:.0%} of the step)"


def make_plan(run: ResolvedRun, costs: ModelCosts, machine: Machine) -> Plan:
    """Plans a run by simulation.

    Raises:
        ConfigError: the architecture does not support the layout.
    """
    works, memory = works_of(run, costs), memory_plan(run, costs, machine)
    ends = [run_rates(run, costs, machine, end) for end in (LOW, TYPICAL, HIGH)]
    times = [step_time(run, works, rates, model=SIMULATED) for rates in ends]
    names = [part.name for part in fields(StepTime)]
    parts = {name: Interval.of(*(getattr(time, name) for time in times)) for name in names}
    splits = [time.split() for time in times]
    split = {name: Interval.of(*(each[name] for each in splits)) for name in splits[0]}
    seconds = Interval.of(*(time.total for time in times))
    tokens = run.accounts.tokens(run.last_step) - run.accounts.tokens(run.first_step - 1)
    per_s = seconds.map(lambda each: run.batch.tokens / each)
    duration = seconds.map(lambda each: each * tokens / run.batch.tokens)  # a ramp's steps by their tokens
    flops, peak, devices = costs.size.flops_per_token, _peak_flops(run, machine), run.topology.world_size
    return Plan(
        memory=memory,
        step=parts,
        split=split,
        step_s=seconds,
        tokens=tokens,
        tokens_per_s=per_s,
        mfu=None if flops is None else per_s.map(lambda each: mfu(each, flops, peak, devices)),
        days=duration.map(lambda each: each / DAY),
        gpu_hours=duration.map(lambda each: each * devices / 3600),
        constraint=max(names, key=lambda name: parts[name].typical) if memory.fits else "memory",
    )


def typical_time(run: ResolvedRun, costs: ModelCosts, machine: Machine, *, model: StepModel) -> StepTime:
    """The typical time of a step alone: by closed forms for a search, simulated for display.

    Raises:
        ConfigError: the architecture does not support the layout.
    """
    return step_time(run, works_of(run, costs), run_rates(run, costs, machine, TYPICAL), model=model)


def run_rates(run: ResolvedRun, costs: ModelCosts, machine: Machine, end: int) -> Rates:
    """A machine's rates for a run's dtype and, on a calibrated machine, for the run's largest product (the MLP's)."""
    config, widths = run.config, costs.shares(run).footprint.widths
    rows = run.batch.micro * run.batch.sequence_length // run.topology.cp
    inner = widths.intermediate if widths.experts else max(1, widths.intermediate // run.topology.tp)
    return rates_of(
        machine,
        dtype_of(config.fp8, bf16=config.bf16.enabled, fp16=config.fp16.enabled),
        end,
        product=TypicalProduct(rows, widths.hidden, inner),
        # FSDP2 overlaps by CUDA streams: on a CPU its collectives block
        hidden=machine.gpu or config.engine == "deepspeed",
    )


def _peak_flops(run: ResolvedRun, machine: Machine) -> float:
    dtype = "bf16" if run.config.bf16.enabled else "fp16" if run.config.fp16.enabled else "fp32"
    return next(machine.peak_flops[each] for each in (dtype, "bf16", "fp32") if each in machine.peak_flops)
