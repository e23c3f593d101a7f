"""Plans of a run's stages: memory, time and money of each, since its layout, length and batch are its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.plan.predict.interval import Interval, days_text, hours_text, seconds_text
from pipeline.plan.predict.plan import Plan, make_plan
from pipeline.plan.predict.planned_run import PlannedRun, planned_run
from pipeline.run.before.memory_summary import shown_bytes


@dataclass(frozen=True)
class PlannedStage:
    """A stage with its plan.

    Attributes:
        name: name of the stage; "batch ramp" for the only stage of a run without stages.
        steps: number of its steps.
        plan: its plan.
    """

    name: str
    steps: int
    plan: Plan


def planned_stages(planned: PlannedRun) -> list[PlannedStage]:
    """Plans every stage of a run; empty for a run without stages.

    Raises:
        ConfigError: the architecture does not support a stage's layout.
    """
    found = []
    for stage in planned.run.stages:
        with stage.naming():
            own = planned_run(stage, planned.machine, vocabulary=planned.vocabulary)
            plan = make_plan(own.run, own.costs, own.machine)
        name = stage.accounts.names[stage.stage] or "batch ramp"
        found.append(PlannedStage(name, stage.last_step + 1 - stage.first_step, plan))
    return found


def stage_lines(stages: Sequence[PlannedStage]) -> Iterator[tuple[str, str]]:
    """Yields label and text of a row for each stage, and of their sum."""
    for stage in stages:
        plan = stage.plan
        memory = f"{plan.memory.peak.shown(shown_bytes)}: {plan.memory.verdict}"
        cost = f"{plan.days.shown(days_text)}, {hours_text(plan.gpu_hours)} GPU-hours"
        step = plan.step_s.shown(seconds_text)
        yield f"stage {stage.name}", f"{stage.steps:,} steps of up to {step}, {plan.tokens:,} tokens"
        yield "", f"{cost}; peak {memory}"
    if len(stages) > 1:
        days, hours = (total_of(stages, name) for name in ("days", "gpu_hours"))
        tokens = sum(each.plan.tokens for each in stages)
        yield "all stages", f"{tokens:,} tokens: {days.shown(days_text)}, {hours_text(hours)} GPU-hours"


def stages_json(stages: Sequence[PlannedStage]) -> list[dict[str, Any]]:
    """Returns the rows as JSON."""
    return [
        {
            "name": each.name,
            "steps": each.steps,
            "tokens": each.plan.tokens,
            "peak": each.plan.memory.peak.plain(),
            "fits": each.plan.memory.fits,
            **{name: getattr(each.plan, name).plain() for name in ("step_s", "days", "gpu_hours")},
        }
        for each in stages
    ]


def total_of(stages: Sequence[PlannedStage], name: str) -> Interval:
    """Returns the sum of a figure of all stages' plans, such as `gpu_hours`."""
    parts = [getattr(each.plan, name) for each in stages]
    return Interval(*(sum(getattr(each, end) for each in parts) for end in ("low", "typical", "high")))
