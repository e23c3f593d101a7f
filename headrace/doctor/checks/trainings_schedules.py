"""The time of a step of each pipeline schedule against its simulation, relative to 1F1B; names a rank that is slow.

The simulation takes equal times for forward pass and both parts of the backward pass, and none for messages.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable

import torch

from foundation.configfile import ConfigTree, merge
from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.rank_context import OWN_CONFIG, config_of
from headrace.doctor.checks.small_runs import small_run
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
    chosen, gpus = config_of(context).parallel.schedule, torch.cuda.device_count()
    every = context.all_layouts or context.config is None
    ranks, names = 4 if gpus >= 4 else 2, [name for name in SCHEDULES if every or name in ("1f1b", chosen)]
    tokens = str(small_run(context, steps=_STEPS).tokens)
    cases = [Case(name, _config(name, ranks, tokens, gpus >= ranks), ranks, save=(), timed=True) for name in names]
    found = run_cases(cases, context.work / "cases", gpus=gpus >= ranks)
    unit = 0.0
    for name in sorted(names, key=lambda each: each != "1f1b"):
        result = found[name]
        if result.error is not None:
            error = result.error.splitlines()[-1]
            yield Finding(False, f"{name}: a rank failed: {error}", "this schedule cannot train", "see the check's log")
            continue
        seconds = statistics.median([result.step_s[step] for step in range(3, _STEPS - PROFILED + 1)])
        unit = unit or seconds / _simulated("1f1b", ranks)
        yield _finding(name, seconds, unit * _simulated(name, ranks), result.own_s, gpus=gpus >= ranks)


def _finding(name: str, seconds: float, expected: float, own: list[float], *, gpus: bool) -> Finding:
    ratio, slow = seconds / expected, [rank for rank, each in enumerate(own) if each > STRAGGLER * min(own)]
    text = f"{name}: a step takes {seconds * 1e3:.1f} ms, {ratio:.2f} times its simulation scaled by 1f1b"
    figures = {"step_ms": seconds * 1e3, "ratio": ratio, "slowest_own_ms": max(own) * 1e3}
    if slow:
        rank = max(slow, key=lambda each: own[each])
        where, times = f"rank {rank}", f"{own[rank] * 1e3:.1f} ms, the fastest {min(own) * 1e3:.1f} ms"
        remedy = "look for other processes, throttling and clocks on that rank's device"
        found = f"{text}; {where} is a straggler: its own work takes {times}."
        return Finding(False, found, "every step would wait for this rank", remedy, figures, where)
    if not gpus:
        return Finding(True, f"{text} (on a CPU, whose ranks share cores, no ratio fails).", figures=figures)
    if ratio <= SLOWER:
        return Finding(True, f"{text} (at most {SLOWER}).", figures=figures)
    remedy = "run with NCCL_DEBUG=INFO; profile a step; take parallel.schedule 1f1b until then"
    return Finding(False, f"{text}; {SLOWER} is allowed.", "messages wait for each other", remedy, figures)


def _config(schedule: str, ranks: int, tokens: str, gpus: bool) -> ConfigTree:
    own = json.loads(OWN_CONFIG.read_text())
    model = {"vocab_size": 256, **(_ON_GPUS if gpus else {})}
    return merge(
        own,
        {
            "model": {"config": model},
            "data": {"sources": [{"path": tokens}], **({"sequence_length": 2048} if gpus else {})},
            "parallel": {"pp": ranks, "schedule": schedule},
            "zero_optimization": {"stage": 0},
            "gradient_accumulation_steps": _MICRO_BATCHES,
            "bf16": {"enabled": gpus},
            "run": {"steps": _STEPS},
        },
    )


def _simulated(schedule: str, ranks: int) -> float:
    """Seconds of a step whose forward pass takes a rank one second for a micro-batch."""
    virtual = 2 if SCHEDULES[schedule].virtual_stages else 1
    options = {"ranks": ranks, "micro_batches": _MICRO_BATCHES, "virtual_stages": virtual}
    program = make_program("torch", schedule, **options)  # type: ignore[arg-type]
    times, transfers = [StageTimes(*[1 / virtual] * 3)] * program.stages, [0.0] * (program.stages - 1)
    return simulate_pipeline(program, times, transfers=transfers).seconds
