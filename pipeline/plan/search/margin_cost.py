"""The cost of `--memory-margin`: the fastest layout that fits a device, but not with the share that stays free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pipeline.plan.predict.closed_form_step import CLOSED
from pipeline.plan.predict.memory_plan import host_fits
from pipeline.plan.predict.plan import typical_time
from pipeline.plan.predict.planned_run import PlannedRun
from pipeline.plan.search.search import Candidate, Search, allowed, simulated
from pipeline.run.before.memory_summary import shown_bytes

_SIMULATED = 3
"""Number of the fastest layouts by closed forms that are simulated."""
_WORTH_IT = 1.05
"""Least gain in speed: plans err by more than a smaller one."""


def margin_cost(planned: PlannedRun, found: Search, winner: Candidate, *, margin: float) -> Iterator[tuple[str, str]]:
    """Yields a line on the fastest layout without the margin; nothing where it is at most 5 % faster than the winner.

    Args:
        planned: the run; its machine's memory is reduced by the margin.
        found: the searched layouts, in which those above the reduced memory have no time.
        winner: the fastest layout within the reduced memory.
        margin: share of a device's memory that stays free.
    """
    costs, machine = planned.costs, planned.machine
    whole = machine.memory.bytes / (1 - margin)
    kept_out = (
        each
        for each in found.candidates
        if machine.memory.bytes < each.peak <= whole
        and "fp8.enabled" not in each.sets
        and host_fits(each.run, costs, machine)
    )
    timed = [replace(each, step_s=typical_time(each.run, costs, machine, model=CLOSED).total) for each in kept_out]
    timed.sort(key=lambda each: each.step_s)
    for each in simulated(allowed(timed, costs, count=_SIMULATED), costs, machine)[:1]:
        if each.step_s * _WORTH_IT < winner.step_s:
            free = math.floor(1000 * (1 - each.peak / whole)) / 1000
            speed = f"{each.run.batch.tokens / each.step_s:,.0f} tokens/s instead of"
            yield (
                "margin",
                f"{each.run.layout}: {speed} {each.run.batch.tokens / winner.step_s:,.0f}, if its peak of"
                f" {shown_bytes(each.peak)} of {shown_bytes(whole)} is near enough: --memory-margin {free:g}",
            )
