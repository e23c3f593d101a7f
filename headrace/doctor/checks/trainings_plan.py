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
from headrace.doctor.checks.shared import config_of, finish, judged, small_run, start
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
        yield Finding(None, f"This machine cannot train the config alone: {error.cause}")
        return
    finish(start(config, folder, ranks=ranks), folder, within_s=0.9 * context.limit_s)
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
        return small.ranks, small.config(folder)
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
    peak, measured = plan.memory.peak.map(lambda each: each / 2**30), found.memory.measured / 2**30
    text = f"Peak memory of a rank: {measured:.2f} GiB, planned {peak.low:.2f} to {peak.high:.2f}."
    figures, remedy = (
        {"peak_gib": measured, "planned_gib": peak.typical},
        "headrace plan --score; a smaller micro-batch",
    )
    yield judged(measured <= _HIGHER * peak.high, text, "a run that the plan lets fit may not fit", remedy, figures)
    retries = found.measured.peak("allocator_retries")
    if "allocator_retries" in found.measured.record["memory"]:
        text = f"The allocator had to retry {retries} times."
        yield judged(not retries, text, "each retry frees the cache and stalls all ranks", "a smaller micro-batch")
    rates = [row["mfu"] for row in read_rows(run_dir, kind="step") if row.get("mfu")][-10:]
    if not rates or plan.mfu is None:
        yield Finding(None, "MFU is not compared: no peak is known of this device, or no FLOPs of the architecture.")
        return
    mfu, planned = statistics.median(rates), plan.mfu
    text, remedy = (
        f"MFU {mfu:.1%}, planned {planned.low:.1%} to {planned.high:.1%}.",
        "see the checks of links and clocks",
    )
    meaning, figures = "the run would take longer and cost more than planned", {"mfu": mfu, "planned": planned.typical}
    yield judged(mfu >= _LOWER * planned.low, text, meaning, remedy, figures)
