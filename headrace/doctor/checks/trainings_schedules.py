"""The time of a step of each pipeline schedule against its simulation, relative to 1F1B; names a rank that is slow.

The simulation takes equal times for the forward pass and for both parts of the backward pass, and none for messages.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import torch

from foundation.configfile import merge
from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.shared import LAYOUTS, config_of, judged, small_run
from pipeline.config.sections.layout import SCHEDULES
from pipeline.plan.predict.pipeline_simulation import StageTimes, simulate_pipeline
from pipeline.plan.predict.schedule_programs import make_program
from pipeline.plan.proof.case import Case
from pipeline.plan.proof.rank import PROFILED
from pipeline.plan.proof.worker import run_cases

_MICRO_BATCHES, _STEPS = 8, 8
_ON_GPUS = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 8}
SLOWER, STRAGGLER = 1.3, 3.0
"""Most that a schedule on GPUs may take, relative to its simulation, and a rank for its own work, to the fastest."""


def run(context: Context) -> Iterable[Finding]:
    """Runs the check."""
    every, count = context.all_layouts or context.config is None, torch.cuda.device_count()
    chosen = {
        "1f1b": "1f1b",
        **{name: name for name in SCHEDULES if every or name == config_of(context).parallel.schedule},
    }
    ranks, gpus = 4 if count >= 4 else 2, count >= 2
    changes: dict[str, Any] = {
        "data": {"sources": [{"path": str(small_run(context, steps=_STEPS).tokens)}]},
        "zero_optimization": {"stage": 0},
        "gradient_accumulation_steps": _MICRO_BATCHES,
        "run": {"steps": _STEPS},
    }
    if gpus:
        changes |= {"model": {"config": _ON_GPUS}, "bf16": {"enabled": True}}
        changes["data"]["sequence_length"] = 2048
    own = merge(LAYOUTS["own"], changes)
    cases = [
        Case(name, {**own, "parallel": {"pp": ranks, "schedule": name}}, ranks, save=(), timed=True) for name in chosen
    ]
    found, unit = run_cases(cases, context.work / "cases", gpus=gpus), 0.0
    for name in chosen:
        if (error := found[name].error) is not None:
            text = f"{name}: a rank failed: {error.splitlines()[-1]}"
            yield Finding(False, text, "this schedule cannot train", "see the check's log")
            continue
        seconds = statistics.median([found[name].step_s[step] for step in range(3, _STEPS - PROFILED + 1)])
        unit = unit or seconds / _simulated(name, ranks)
        yield _finding(name, seconds, seconds / (unit * _simulated(name, ranks)), found[name].own_s, gpus=gpus)


def _finding(name: str, seconds: float, ratio: float, own: list[float], *, gpus: bool) -> Finding:
    allowed = f"at most {SLOWER}" if gpus else "on a CPU, whose ranks share cores, no ratio fails"
    text = f"{name}: a step takes {seconds * 1e3:.1f} ms, {ratio:.2f} times its simulation scaled by 1f1b ({allowed})"
    slowest, fastest = max(own), min(own)
    figures = {"step_ms": seconds * 1e3, "ratio": ratio, "slowest_ms": slowest * 1e3, "fastest_ms": fastest * 1e3}
    if slowest <= STRAGGLER * fastest:
        remedy = "run with NCCL_DEBUG=INFO; profile a step; take parallel.schedule 1f1b until then"
        return judged(ratio <= SLOWER or not gpus, f"{text}.", "messages wait for each other", remedy, figures)
    where = f"rank {own.index(slowest)}"
    text += f"; {where} is a straggler: its own work takes {slowest * 1e3:.1f} ms, the fastest {fastest * 1e3:.1f} ms."
    remedy = "look for other processes, throttling and clocks on that rank's device"
    return Finding(False, text, "every step would wait for this rank", remedy, figures, where)


def _simulated(schedule: str, ranks: int) -> float:
    """Seconds of a step whose forward pass takes a rank one second for a micro-batch."""
    virtual = 2 if SCHEDULES[schedule].virtual_stages else 1
    program = make_program("torch", schedule, ranks=ranks, micro_batches=_MICRO_BATCHES, virtual_stages=virtual)
    times, transfers = [StageTimes(*[1 / virtual] * 3)] * program.stages, [0.0] * (program.stages - 1)
    return simulate_pipeline(program, times, transfers=transfers).seconds
