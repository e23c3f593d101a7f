"""Finds the time that matters most: simulates the goodput gained when each time is halved, over the same seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeline.runtime.goodput.failures.model import FailureModel, expected_goodput
from pipeline.runtime.goodput.failures.simulation import simulate

_TIMES = ("detect_s", "requeue_s", "start_s", "load_s", "first_step_s", "save_blocking_s", "save_s")


@dataclass(frozen=True)
class GoodputGain:
    """The gain of goodput by a change of one input.

    Attributes:
        change: change in words.
        value: value of the input before the change.
        simulated: gain of goodput in the simulation, a fraction.
        formula: gain of goodput by the closed formula, a fraction.
    """

    change: str
    value: float
    simulated: float
    formula: float


def sensitivity(model: FailureModel, *, seeds: Sequence[int]) -> list[GoodputGain]:
    """Gains by halving each time, half or twice the interval, half the failures, twice the spares; largest first."""
    before, formula = simulate(model, seeds=seeds).mean, expected_goodput(model)

    def gain(change: str, value: float, other: FailureModel) -> GoodputGain:
        simulated = simulate(other, seeds=seeds).mean - before
        return GoodputGain(change, value, simulated, expected_goodput(other) - formula)

    halved: Callable[[str], FailureModel] = lambda name: replace(model, **{name: getattr(model, name) / 2})  # noqa: E731
    found = [gain(f"{name} / 2", getattr(model, name), halved(name)) for name in _TIMES if getattr(model, name)]
    if model.interval_s / 2 >= model.save_s:
        found.append(gain("interval_s / 2", model.interval_s, halved("interval_s")))
    found.append(gain("interval_s x 2", model.interval_s, replace(model, interval_s=2 * model.interval_s)))
    found.append(gain("node_mtbf_s x 2", model.node_mtbf_s, replace(model, node_mtbf_s=2 * model.node_mtbf_s)))
    found.append(gain("spares x 2", model.spares, replace(model, spares=2 * model.spares)))
    return sorted(found, key=lambda each: -each.simulated)
