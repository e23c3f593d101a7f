"""Predicts the loss of the large run with an interval, or says why the ladder must not be extrapolated.

A fit is used when it predicts runs that it has not seen (`left_out.py`). The interval is that of a single run. Each
form that passes the test gives a normal distribution of the log of the loss around its prediction. The errors of the
form's extrapolations within the ladder, grown to the distance of the large run, give its width.
docs/how-to/scaling-ladder.md says how often the interval holds the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.plan.ladder.fit import Laws, Points, fit
from pipeline.plan.ladder.left_out import LeftOut, left_out

LEVEL = 0.9
"""Nominal coverage of the interval."""
SAMPLES = 20_000
"""Number of draws for each form."""
_TOO_WIDE = 0.1
"""Largest half-width of a useful interval, as a share of the prediction."""


@dataclass(frozen=True)
class Prediction:
    """A predicted loss.

    Attributes:
        loss: predicted loss in nats per token, by the form with the smallest error on runs left out.
        low, high: ends of the interval, in nats per token.
    """

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class PredictionVerdict:
    """The verdict on a ladder: a prediction, or the reasons against one.

    Attributes:
        law: law of the form with the smallest error on runs left out, among the forms that pass if any passes; None
            where no form can be fitted.
        left_out: test of each form that can be fitted, best first.
        reasons: reasons against the fit; empty where it may be used.
        prediction: predicted loss of the large run; None where there are reasons.
    """

    law: Laws | None
    left_out: tuple[LeftOut, ...]
    reasons: tuple[str, ...]
    prediction: Prediction | None


def judge(
    points: Points, names: Sequence[str], *, parameters: float, tokens: float, tolerance: float, seed: int = 0
) -> PredictionVerdict:
    """Fits and tests the laws and, where one passes, predicts the loss of the large run.

    Args:
        points: finished runs.
        names: names of the runs, for the reasons.
        parameters, tokens: N and D of the large run.
        tolerance: largest root mean square of the relative error of the loss on runs left out.
        seed: seed of the draws.
    """
    reasons = list(_disagreements(points, names, tolerance))
    tests = sorted(left_out(points), key=lambda each: each.rms)
    if not tests:
        reasons.append(f"{len(points)} finished runs are too few for a law whose rungs are left out in turn")
        return PredictionVerdict(None, (), tuple(reasons), None)
    best = tests[0]
    law = fit(points, best.form)
    passed = [each for each in tests if max(each.rms, each.largest) <= tolerance]
    if not passed:
        reasons.append(
            f"rungs left out are predicted with an error of {best.rms:.1%} (the largest with {best.largest:.1%}), and"
            f" {tolerance:.1%} is allowed"
        )
    if reasons:
        return PredictionVerdict(law, tuple(tests), tuple(reasons), None)
    law = fit(points, passed[0].form)
    found = _interval(points, passed, law, parameters=parameters, tokens=tokens, seed=seed)
    if (found.high - found.low) / 2 > _TOO_WIDE * found.loss:
        reasons.append(
            f"the interval of the prediction, {found.low:.3f} to {found.high:.3f}, is wider than +-{_TOO_WIDE:.0%}"
        )
    return PredictionVerdict(law, tuple(tests), tuple(reasons), None if reasons else found)


def _disagreements(points: Points, names: Sequence[str], tolerance: float) -> Iterator[str]:
    """Reasons against a fit: losses that are not finite, or worse than with fewer parameters or tokens."""
    bad = [name for name, loss in zip(names, points.losses, strict=True) if not np.isfinite(loss)]
    if bad:
        yield f"the loss of {', '.join(bad)} is not finite"
    for small, large in itertools.permutations(range(len(points)), 2):
        more = points.parameters[large] >= points.parameters[small] and points.tokens[large] >= points.tokens[small]
        same = points.parameters[large] == points.parameters[small] and points.tokens[large] == points.tokens[small]
        if more and not same and points.losses[large] > points.losses[small] * (1 + tolerance):
            yield (
                f"the rungs disagree: {names[large]} has loss {points.losses[large]:.3f}, and {names[small]}, with"
                f" fewer parameters or tokens, {points.losses[small]:.3f}"
            )


def _interval(
    points: Points, passed: Sequence[LeftOut], law: Laws, *, parameters: float, tokens: float, seed: int
) -> Prediction:
    random = np.random.default_rng(seed)
    distance = float(np.log(parameters / points.parameters.max()))
    drawn = []
    for each in passed:
        center = (law if each.form == law.form else fit(points, each.form)).predict(parameters, tokens)[0]
        drawn.append(center * np.exp(each.spread(distance) * random.standard_normal(SAMPLES)))
    low, high = np.quantile(np.concatenate(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    loss = float(law.predict(parameters, tokens)[0])
    return Prediction(loss, min(float(low), loss), max(float(high), loss))
