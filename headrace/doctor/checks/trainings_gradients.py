"""Losses and gradients of the config's layout against one process, by `headrace prove`; `--all`: of every layout."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from foundation.configfile import merge
from foundation.errors import ConfigError
from foundation.section import parse
from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.rank_context import OWN_CONFIG, config_of
from headrace.doctor.checks.small_runs import SmallRun, small_run
from pipeline.config.sections.run import Config
from pipeline.plan.proof.command import prove
from pipeline.plan.proof.equivalence import ProofResult

LAYOUTS = Path(__file__).with_name("layouts.json")
"""Name -> the keys in which a layout differs from the check's own config."""
_STEPS = 4
_MEANING = "this layout trains another model than one process would, without an error"


def run(context: Context) -> Iterable[Finding]:
    """Runs the check."""
    until = time.monotonic() + 0.8 * context.limit_s
    layouts = {"the config's layout": config_of(context)}
    if context.all_layouts:
        own = json.loads(OWN_CONFIG.read_text())
        changes = json.loads(LAYOUTS.read_text())
        layouts |= {name: parse(Config, merge(own, each)) for name, each in changes.items()}
    for number, (name, config) in enumerate(layouts.items()):
        if time.monotonic() > until:
            yield Finding(None, f"{name}: not compared within the limit of {context.limit_s:.0f} s.")
            continue
        try:
            small = small_run(context, steps=_STEPS, config=config)
        except ConfigError as error:
            yield Finding(None, f"{name}: it cannot be shrunk: {str(error).splitlines()[0]}")
            continue
        if config.fp8.enabled:
            yield Finding(None, f"{name}: fp8 products take larger matrices than a shrunk model's: compared in bf16.")
        work = context.work / f"proof-{number}"
        work.mkdir()
        yield from _findings(name, small, prove(small.shrunk, work, steps=_STEPS, gpus=small.gpus))


def _findings(name: str, small: SmallRun, results: Iterable[ProofResult]) -> Iterator[Finding]:
    for result in results:
        about = f"{name} ({small.shrunk.topology}, {small.place}, {result.precision})"
        if result.error is not None:
            yield Finding(False, f"{about}: a rank failed: {result.error.splitlines()[-1]}", "it cannot train at all")
            continue
        worst = max(result.comparisons, key=lambda each: each.difference / each.tolerance)
        found = f"the largest difference is {worst.difference:.1e} (tolerance {worst.tolerance:.1e})"
        text = f"{about} against one process: {found}, of {worst.quantity} at {worst.location}"
        figures = {re.sub(r"\W+", "_", each.quantity): each.difference for each in result.comparisons}
        if result.passed or result.inconclusive:
            more = "" if result.passed else ", as much as noise of the size of rounding makes"
            yield Finding(True if result.passed else None, f"{text}{more}.", figures=figures)
        else:
            remedy = "headrace prove --config F --gradients names the tensors; train in another layout until then"
            yield Finding(False, f"{text}.", _MEANING, remedy, figures)
