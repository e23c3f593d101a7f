"""What measures the steps of a run on one rank: clock, memory, stragglers, profiler, compilations, model FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.run.agreed_peak import AgreedPeak
from pipeline.run.garbage import GarbageCollector
from pipeline.run.step_times import StepTimes
from pipeline.runtime.metrics.profiling import StepProfiler
from pipeline.runtime.metrics.step_clock import StepClock
from pipeline.runtime.metrics.stragglers import Stragglers


@dataclass(frozen=True)
class Instruments:
    """Of one rank.

    Attributes:
        clock: measures steps from report to report.
        times: of the steps, for the record of what was measured.
        memory: peak memory.
        stragglers: measures how long every rank works, and names slow ones.
        profiler: records the steps that the config names.
        garbage: collects cycles of Python objects at chosen steps, so that no step is measured with one.
        compilations: how many graphs were compiled since the last call, and in how many seconds.
        flops_per_token: of the model, forward and backward.
        peak_flops: of one device, in FLOP/s; None where it is not known.
    """

    clock: StepClock
    times: StepTimes
    memory: AgreedPeak
    stragglers: Stragglers
    profiler: StepProfiler
    garbage: GarbageCollector
    compilations: Callable[[], tuple[int, float]]
    flops_per_token: float | None
    peak_flops: float | None
