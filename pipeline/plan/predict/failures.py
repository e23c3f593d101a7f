"""Time that failures of nodes add to a plan, by the formula of `headrace goodput` at its defaults."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.plan.predict.interval import Interval
from pipeline.plan.predict.plan import Plan
from pipeline.runtime.goodput.failures.model import FailureModel, expected_goodput, with_best_interval


@dataclass(frozen=True)
class UnderFailures:
    """Goodput, time and GPU-hours of a plan with failures.

    Attributes:
        goodput: expected share of the time that goes into steps that are kept.
        mtbf_s: mean time between failures of all nodes, in seconds.
        interval_s: seconds between two checkpoints, the optimum by Daly.
        days: days of the run, failures included.
        gpu_hours: GPU-hours of all devices, failures included.
    """

    goodput: float
    mtbf_s: float
    interval_s: float
    days: Interval
    gpu_hours: Interval


def under_failures(plan: Plan, *, nodes: int) -> UnderFailures:
    """Adds failures of `nodes` nodes to a plan: Llama 3's rate, spares at hand, the best checkpoint interval."""
    model = with_best_interval(FailureModel(nodes=nodes))
    goodput = expected_goodput(model)
    return UnderFailures(
        goodput,
        model.mtbf_s,
        model.interval_s,
        plan.days.map(lambda each: each / goodput),
        plan.gpu_hours.map(lambda each: each / goodput),
    )
