"""Instruments for the steps of a run on one rank: clock, memory, stragglers, profiler, compilations, model FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from pipeline.engines.base import Engine
from pipeline.engines.parallel.compilation import compilation_clock
from pipeline.run.agreed_peak import AgreedPeak
from pipeline.run.garbage import GarbageCollector
from pipeline.run.prepare import PreparedRun
from pipeline.run.step_times import StepTimes
from pipeline.runtime.metrics.memory import PeakMemory
from pipeline.runtime.metrics.mfu import peak_flops
from pipeline.runtime.metrics.profiling import StepProfiler
from pipeline.runtime.metrics.step_clock import StepClock
from pipeline.runtime.metrics.stragglers import Stragglers, peers_of, report_interval, report_seconds


@dataclass(frozen=True)
class Instruments:
    """The instruments of one rank.

    Attributes:
        clock: measures steps from report to report.
        times: seconds of the newest steps, for the event `measured` of the journal.
        memory: peak memory.
        stragglers: measures how long every rank works, and names slow ones.
        profiler: records the steps that the config names.
        garbage: collects cycles of Python objects at chosen steps, so that no step is measured with one.
        compilations: returns the number of graphs compiled since the last call, and the seconds that took.
        flops_per_token: FLOPs the model spends on one token, forward and backward; None where they are not known.
        peak_flops: peak FLOP/s of one device; None where they are not known.
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


def make_instruments(
    prepared: PreparedRun,
    engine: Engine,
    device: torch.device,
    *,
    rank: int,
    say: Callable[[str], None],
    stack: ExitStack,
) -> Instruments:
    """Makes the instruments of a rank.

    Args:
        prepared: the run.
        engine: executes the steps; names the device.
        rank: global rank of this process.
        say: prints a line.
        stack: ends the profiler and the garbage collector.
    """
    run, gpu = prepared.run, device.type == "cuda"
    config = run.config
    layers = int(prepared.hf_config.get("num_hidden_layers") or 0)
    stragglers = Stragglers(
        threshold=config.stragglers.threshold,
        every=report_interval(config.stragglers, seconds=report_seconds(run.topology, run.batch, layers=layers)),
        peers=peers_of(run.topology),
        rank=rank,
        gpu=torch.cuda.is_available(),
    )
    return Instruments(
        clock=StepClock(),
        times=StepTimes(),
        memory=AgreedPeak(PeakMemory(device)),
        stragglers=stragglers,
        profiler=stack.enter_context(
            StepProfiler(config.profile, run_dir=prepared.run_dir, rank=rank, gpu=gpu, say=say)
        ),
        garbage=stack.enter_context(GarbageCollector(config.run.gc_every)),
        compilations=compilation_clock(config.compile),
        flops_per_token=prepared.size.flops_per_token,
        peak_flops=peak_flops(engine.device_name, bf16=config.bf16.enabled),
    )
