"""Twenty steps of the config: peak memory and MFU against `headrace plan`, and no retry of the allocator.

On a machine with the GPUs for it the config is trained as it is, on its data, or on synthetic tokens while that is not
there; else the small version of it on CPU processes, whose speed says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from foundation.configfile import ConfigTree
from foundation.errors import ConfigError
from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.rank_context import config_of
from headrace.doctor.checks.small_runs import small_run, start
from pipeline.config.rules.resolve import resolve
from pipeline.plan.calibration.score import Score, machine_of, read_measured, score
from pipeline.plan.predict.plan import Plan, make_plan
from pipeline.plan.proof.tokens import write_tokens
from pipeline.runtime.machines.known import load_machine
from pipeline.runtime.metrics.journal import read_rows

_STEPS = 20
_HIGHER, _LOWER = 1.05, 0.9
"""Peak memory may be this many times the high end of the plan, and MFU of its low end: the formulas' own error, and the
spread of 20 steps."""


def run(context: Context) -> Iterable[Finding]:
    """Runs the check.

    Raises:
        TrainingError: the training has failed.
    """
    folder, gpus = context.work / "steps", torch.cuda.device_count()
    try:
        ranks, config = _training(context, folder, gpus)
    except ConfigError as error:
        yield Finding(None, f"This machine cannot train the config alone: {str(error).splitlines()[0]}")
        return
    start(config, folder, processes=ranks).finish(0.9 * context.limit_s)
    measured = read_measured(folder / "run")
    try:
        machine = machine_of(measured) if gpus else load_machine("cpu")
    except ConfigError as error:
        yield Finding(None, f"The plan has no rates: {error.why}")
        return
    found = score(measured, machine)
    yield from _findings(found, make_plan(found.planned.run, found.planned.costs, machine), folder / "run")


def _training(context: Context, folder: Path, gpus: int) -> tuple[int, ConfigTree]:
    """Number of ranks and config of the training.

    Raises:
        ConfigError: the GPUs of this machine cannot form the layout.
    """
    if not gpus:
        small = small_run(context, steps=_STEPS)
        return small.shrunk.topology.world_size, small.config(folder)
    config = config_of(context)
    resolve(config, world_size=gpus)
    raw = config.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    if not all(Path(str(getattr(source, "path", ""))).is_dir() for source in config.data.sources):
        vocabulary = int((config.model.config or {}).get("vocab_size", 32_000))
        write_tokens(context.work / "data", vocab_size=vocabulary, tokens=2_000_000, longest=4096)
        raw["data"] |= {"sources": [{"path": str(context.work / "data")}]}
    raw["run"] = {"dir": str(folder / "run"), "steps": _STEPS, "checkpoint_minutes": 0}
    return gpus, {**raw, "evaluation": {"samples": 8}}


def _findings(found: Score, plan: Plan, run_dir: Path) -> Iterator[Finding]:
    gib, peak, measured = 2**30, plan.memory.peak, found.memory.measured
    text = f"Peak memory of a rank: {measured / gib:.2f} GiB, planned {peak.low / gib:.2f} to {peak.high / gib:.2f}"
    figures = {"peak_gib": measured / gib, "planned_gib": found.memory.predicted / gib}
    if measured <= _HIGHER * peak.high:
        yield Finding(True, f"{text}.", figures=figures)
    else:
        meaning = "a run that the plan lets fit may run out of memory"
        yield Finding(False, f"{text}.", meaning, "headrace plan --score, and a smaller micro-batch", figures)
    retries = found.measured.peak("memory_alloc_retries")
    if retries:
        meaning, remedy = "each retry frees the cache and stalls all ranks", "a smaller micro-batch; see memory above"
        yield Finding(False, f"The allocator had to retry {retries} times.", meaning, remedy, {"retries": retries})
    elif retries == 0:
        yield Finding(True, "The allocator never had to retry.", figures={"retries": 0})
    rates = [row["mfu"] for row in read_rows(run_dir, kind="step") if row.get("mfu")][-10:]
    if not rates or plan.mfu is None:
        why = "this device has no known peak" if not rates else "the architecture's FLOPs are unknown"
        yield Finding(None, f"MFU and the allocator's retries are not compared: {why}, or it is no GPU.")
        return
    mfu, low = statistics.median(rates), plan.mfu.low
    text, figures = (
        f"MFU {mfu:.1%}, planned {low:.1%} to {plan.mfu.high:.1%}",
        {"mfu": mfu, "planned_mfu": plan.mfu.typical},
    )
    if mfu >= _LOWER * low:
        yield Finding(True, f"{text}.", figures=figures)
    else:
        remedy = "see the checks of links and clocks above; headrace train with section profile shows what waits"
        yield Finding(False, f"{text}.", "the run would take longer and cost more than planned", remedy, figures)
