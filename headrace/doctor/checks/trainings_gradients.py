"""Losses and gradients of the config's layout against one process, by `headrace prove`; `--all`: of every layout."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator

from foundation.configfile import merge
from foundation.errors import ConfigError
from foundation.section import parse
from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.shared import LAYOUTS, config_of, judged, small_run
from pipeline.config.sections.run import Config
from pipeline.plan.proof.command import prove
from pipeline.plan.proof.equivalence import ProofResult

_STEPS = 4
_MEANING = "this layout trains another model than one process would, without an error"
_REMEDY = "headrace prove --config F --gradients names the tensors; train in another layout until then"


def run(context: Context) -> Iterable[Finding]:
    """Runs the check."""
    until, layouts = time.monotonic() + 0.8 * context.limit_s, {"the config's layout": config_of(context)}
    for name, changes in LAYOUTS["layouts"].items() if context.all_layouts else ():
        layouts[name] = parse(Config, merge(LAYOUTS["own"], changes))
    for name, config in layouts.items():
        if time.monotonic() > until:
            yield Finding(None, f"{name}: not compared within the limit of {context.limit_s:.0f} s.")
            continue
        try:
            small = small_run(context, steps=_STEPS, config=config)
        except ConfigError as error:
            yield Finding(None, f"{name}: it cannot be shrunk: {error.cause}")
            continue
        if config.fp8.enabled:
            yield Finding(None, f"{name}: fp8 products take larger matrices than a shrunk model's: it is seen in bf16.")
            name += " in bf16"  # noqa: PLW2901
        work = context.work / re.sub(r"\W+", "-", name)
        work.mkdir()
        for result in prove(small.shrunk, work, steps=_STEPS, gpus=small.gpus):
            yield from _findings(f"{name} ({small}, {result.precision})", result)


def _findings(about: str, result: ProofResult) -> Iterator[Finding]:
    if result.error is not None:
        yield Finding(False, f"{about}: a rank failed: {result.error.splitlines()[-1]}", _MEANING, _REMEDY)
        return
    worst = max(result.comparisons, key=lambda each: each.difference / each.tolerance)
    found = f"the largest difference is {worst.difference:.1e} (tolerance {worst.tolerance:.1e})"
    text = f"{about} against one process: {found}, of {worst.quantity} at {worst.location}"
    figures = {re.sub(r"\W+", "_", each.quantity): each.difference for each in result.comparisons}
    if result.inconclusive:
        yield Finding(None, f"{text}, no more than noise of the size of rounding makes.", figures=figures)
    else:
        yield judged(result.passed, f"{text}.", _MEANING, _REMEDY, figures)
