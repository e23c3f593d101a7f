"""Predicts the loss of the large run with an interval, or says why the ladder must not be extrapolated.

The test of a fit is what it says of runs that it has not seen: each rung is left out in turn, and its runs are
predicted by the law of the others. The interval is of a single run: bootstrap samples of the runs give the law's
spread (Efron 1979), and each sample has one of the errors of the runs left out on top. Laws with free and with fixed
exponents are both fitted; the interval covers all that pass the test.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.ladder.fit import Array, Form, Laws, Points, can_fit, fit

FORMS: tuple[Form, ...] = ("free exponents", "fixed exponents")
LEVEL = 0.9
"""Of the interval."""
SAMPLES = 300
"""Bootstrap samples of each form."""
_TOO_WIDE = 0.1
"""Half of an interval, as a share of the prediction, above which it decides nothing."""
_DRAWS = 50
"""Tries per bootstrap sample to draw one that a law can be fitted to."""


@dataclass(frozen=True)
class LeftOut:
    """A form's predictions of runs left out.

    Attributes:
        form: of the law.
        errors: float64 [runs]: log of predicted by measured loss of each run, by the law of the other rungs' runs.
        largest: the root mean square of those of the largest rung alone: the only ones that extrapolate.
    """

    form: Form
    errors: Array
    largest: float

    @property
    def rms(self) -> float:
        """Root mean square of the errors: a relative error of the loss."""
        return float(np.sqrt(np.mean(self.errors**2)))


@dataclass(frozen=True)
class Prediction:
    """A predicted loss.

    Attributes:
        loss: nats per token, of the form with the smallest error on runs left out.
        low, high: ends of the interval.
    """

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """What a ladder says.

    Attributes:
        law: of the form with the smallest error on runs left out; None where no form can be fitted.
        left_out: of each form that can be fitted, best first.
        reasons: why the fit must not be used; empty where it may be.
        prediction: of the large run; None where there are reasons.
    """

    law: Laws | None
    left_out: tuple[LeftOut, ...]
    reasons: tuple[str, ...]
    prediction: Prediction | None


def judge(
    points: Points, names: Sequence[str], *, parameters: float, tokens: float, tolerance: float, seed: int = 0
) -> Verdict:
    """Fits, tests and, where the test is passed, predicts.

    Args:
        points: finished runs.
        names: of the runs.
        parameters, tokens: N and D of the large run.
        tolerance: largest relative error of the loss on runs left out, root mean square.
        seed: of the bootstrap.
    """
    reasons = list(_disagreements(points, names, tolerance))
    left_out = sorted(_left_out(points), key=lambda each: each.rms)
    if not left_out:
        reasons.append(f"{len(points)} finished runs are too few for a law whose rungs are left out in turn")
        return Verdict(None, (), tuple(reasons), None)
    best = left_out[0]
    law = fit(points, best.form)
    passed = [each for each in left_out if max(each.rms, each.largest) <= tolerance]
    if not passed:
        reasons.append(
            f"rungs left out are predicted with an error of {best.rms:.1%} (the largest with {best.largest:.1%}), and"
            f" {tolerance:.1%} is allowed"
        )
    if reasons:
        return Verdict(law, tuple(left_out), tuple(reasons), None)
    law = fit(points, passed[0].form)
    found = _interval(points, passed, law, parameters=parameters, tokens=tokens, seed=seed)
    if (found.high - found.low) / 2 > _TOO_WIDE * found.loss:
        reasons.append(
            f"the interval of the prediction, {found.low:.3f} to {found.high:.3f}, is wider than +-{_TOO_WIDE:.0%}"
        )
    return Verdict(law, tuple(left_out), tuple(reasons), None if reasons else found)


def _disagreements(points: Points, names: Sequence[str], tolerance: float) -> Iterator[str]:
    """Runs that are not finite, or worse than one with fewer parameters and no more tokens."""
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


def _left_out(points: Points) -> Iterator[LeftOut]:
    """Of each form that can be fitted whichever rung is left out."""
    if not np.isfinite(points.losses).all():
        return
    sizes = np.unique(points.parameters)
    for form in FORMS:
        kept = [points.take(np.flatnonzero(points.parameters != size)) for size in sizes]
        if not all(can_fit(each, form) for each in kept):
            continue
        errors = np.empty(len(points))
        for size, others in zip(sizes, kept, strict=True):
            where = np.flatnonzero(points.parameters == size)
            out = points.take(where)
            predicted = fit(others, form).predict(out.parameters, out.tokens)[0]
            errors[where] = np.log(predicted / out.losses)
        largest = errors[points.parameters == sizes[-1]]
        yield LeftOut(form, errors, float(np.sqrt(np.mean(largest**2))))


def _interval(
    points: Points, passed: Sequence[LeftOut], law: Laws, *, parameters: float, tokens: float, seed: int
) -> Prediction:
    random = np.random.default_rng(seed)
    drawn = []
    for each in passed:
        start = law if each.form == law.form else fit(points, each.form)
        laws = fit(points, each.form, weights=_weights(points, each.form, random), start=start)
        # an error is as likely to be on the other side, as there are few of them
        errors = random.choice(np.concatenate([each.errors, -each.errors]), SAMPLES)
        drawn.append(laws.predict(parameters, tokens) * np.exp(errors))
    low, high = np.quantile(np.concatenate(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    loss = float(law.predict(parameters, tokens)[0])
    return Prediction(loss, min(float(low), loss), max(float(high), loss))


def _weights(points: Points, form: Form, random: np.random.Generator) -> Array:
    """Float64 [samples, runs]: how often each run is in a bootstrap sample; all samples determine a law."""
    rows, count = [], len(points)
    for _ in range(SAMPLES):
        for _ in range(_DRAWS):
            drawn = random.integers(count, size=count)
            if can_fit(points.take(np.unique(drawn)), form):
                break
        else:
            drawn = np.arange(count)
        rows.append(np.bincount(drawn, minlength=count).astype(np.float64))
    return np.array(rows)
