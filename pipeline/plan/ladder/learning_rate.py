"""Chooses the learning rate by the sweep on a ladder's smallest rung."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foundation.errors import DataError
from pipeline.plan.ladder.plan import Ladder, LadderRun
from pipeline.plan.ladder.runs import Done, done_of

BROAD = 0.005
"""Share of the loss within which the config's own learning rate counts as good as the best of the sweep."""
_EXTENSIONS = 2
"""Most times that a sweep is extended by a factor of two, while its best rate is the first or the last."""


@dataclass(frozen=True)
class Chosen:
    """The outcome of a sweep.

    Attributes:
        factor: factor on all scaled learning rates and on the large run's; 1 keeps the config's rate.
        points: factor and loss of each run, by factor.
        at_the_end: whether the best rate is the largest or smallest tried: a better rate may lie beyond.
    """

    factor: float
    points: tuple[tuple[float, float], ...]
    at_the_end: bool


def sweep(ladder: Ladder, train: Callable[[Sequence[LadderRun]], int]) -> tuple[Chosen | None, int]:
    """Trains the sweep, and extends it while the best rate is at its end.

    Args:
        ladder: ladder whose smallest rung is swept.
        train: function that trains the runs that are not finished, and returns an exit code.

    Returns:
        The outcome, None where a run failed; and the exit code.
    """
    reach = ladder.options.learning_rates // 2
    low, high = -reach, reach
    for extension in range(_EXTENSIONS + 1):
        runs = ladder.sweep(range(low, high + 1))
        code = train(runs)
        if code:
            return None, code
        losses = [each.loss for each in done_of(ladder, runs)]
        best = int(np.argmin(losses))
        if extension == _EXTENSIONS or len(losses) == 1 or 0 < best < len(losses) - 1:
            break
        low, high = (low - 1, high) if best == 0 else (low, high + 1)
    return choose(done_of(ladder, runs), range(low, high + 1)), 0


def chosen_before(ladder: Ladder) -> Chosen:
    """The outcome of a finished sweep, with its extensions.

    Raises:
        DataError: the sweep is not finished.
    """
    reach = ladder.options.learning_rates // 2
    for low, high in [(-reach - e, reach) for e in (2, 1)] + [(-reach, reach + e) for e in (2, 1, 0)]:
        runs = ladder.sweep(range(low, high + 1))
        done = done_of(ladder, runs)
        if len(done) == len(runs):
            return choose(done, range(low, high + 1))
    raise DataError(f"the sweep in {ladder.output} is not finished\n  try: the same command without --phase")


def choose(done: Sequence[Done], exponents: Sequence[int]) -> Chosen:
    """Chooses the learning rate at the minimum of a parabola through the best run and its neighbours, over log lr.

    The config's own rate is kept where its loss is within `BROAD` of the best.

    Args:
        done: all runs of the sweep, by learning rate.
        exponents: exponents of the powers of two by which the config's scaled rate was multiplied.
    """
    losses = [each.loss for each in done]
    points = tuple((2.0**exponent, loss) for exponent, loss in zip(exponents, losses, strict=True))
    best = int(np.argmin(losses))
    ended = len(losses) > 1 and best in (0, len(losses) - 1)
    own = losses[list(exponents).index(0)]
    if own <= losses[best] * (1 + BROAD):
        return Chosen(1.0, points, ended)
    return Chosen(2.0 ** (exponents[best] + (0.0 if ended else _vertex(losses[best - 1 : best + 2]))), points, ended)


def _vertex(losses: Sequence[float]) -> float:
    """Position, between -0.5 and 0.5, of the minimum of a parabola through losses at -1, 0 (the lowest) and 1."""
    before, lowest, after = losses
    bend = before - 2 * lowest + after
    shift = (before - after) / (2 * bend) if bend > 0 else 0.0
    return math.copysign(min(abs(shift), 0.5), shift)
