"""Tests a law by its predictions of runs that it was not fitted to.

Each rung is left out in turn, which tells whether the form fits. Then the largest rung, the two largest and so on are
left out, as long as the other runs can be fitted: this tells how errors grow with the distance of an extrapolation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.plan.ladder.fit import UNKNOWNS, Array, Form, Laws, Points, can_fit, fit

FORMS: tuple[Form, ...] = ("free exponents", "fixed exponents")


@dataclass(frozen=True)
class LeftOut:
    """A form's predictions of runs left out.

    Attributes:
        form: form of the law.
        errors: float64 [runs]: log of predicted over measured loss of each run, by the law fitted to the other rungs.
        largest: root mean square of the errors of the largest rung alone.
        distances: float64 [extrapolations]: log of the N of a run over the N of the largest rung that was fitted.
        extrapolated: float64 [extrapolations]: log of predicted over measured loss at these distances.
        noise: root mean square, per degree of freedom, of log predicted over measured loss, when the law is fitted to
            all runs.
    """

    form: Form
    errors: Array
    largest: float
    distances: Array
    extrapolated: Array
    noise: float

    @property
    def rms(self) -> float:
        """Root mean square of the errors: a relative error of the loss."""
        return float(np.sqrt(np.mean(self.errors**2)))

    @property
    def growth(self) -> float:
        """Root mean square, over the extrapolations, of the error beyond the noise per unit of distance."""
        beyond = np.maximum(self.extrapolated**2 - self.noise**2, 0.0)
        return float(np.sqrt(np.mean(beyond / self.distances**2)))

    def spread(self, distance: float) -> float:
        """Standard deviation of log predicted over measured loss of one run at a distance.

        The noise of a run stays the same. The error of the law grows in proportion to the distance, as does, to first
        order, the effect of a wrong exponent on the logarithm of the loss.
        """
        return float(np.hypot(self.noise, self.growth * max(distance, 0.0)))


def left_out(points: Points) -> Iterator[LeftOut]:
    """Tests each form that can be fitted whichever rung is left out."""
    if not np.isfinite(points.losses).all():
        return
    sizes = np.unique(points.parameters)
    for form in FORMS:
        if not all(can_fit(points.take(np.flatnonzero(points.parameters != size)), form) for size in sizes):
            continue
        errors = np.empty(len(points))
        for size in sizes:
            out = points.parameters == size
            errors[out] = _errors(points, form, out)
        largest = errors[points.parameters == sizes[-1]]
        distances, extrapolated = _extrapolations(points, form, sizes)
        noise = _noise(points, fit(points, form))
        yield LeftOut(form, errors, float(np.sqrt(np.mean(largest**2))), distances, extrapolated, noise)


def _extrapolations(points: Points, form: Form, sizes: Array) -> tuple[Array, Array]:
    """Distances and errors of all runs above a rung, by a law fitted to this rung and the smaller ones."""
    distances, errors = [], []
    for size in sizes[-2::-1]:
        out = points.parameters > size
        if not can_fit(points.take(np.flatnonzero(~out)), form):
            break
        distances.append(np.log(points.parameters[out] / size))
        errors.append(_errors(points, form, out))
    return np.concatenate(distances), np.concatenate(errors)


def _errors(points: Points, form: Form, out: np.ndarray) -> Array:
    """Log of predicted over measured loss of the runs `out`, bool [runs], by a law fitted to the others."""
    law = fit(points.take(np.flatnonzero(~out)), form)
    found: Array = np.log(law.predict(points.parameters[out], points.tokens[out])[0] / points.losses[out])
    return found


def _noise(points: Points, law: Laws) -> float:
    residuals = np.log(law.predict(points.parameters, points.tokens)[0] / points.losses)
    return float(np.sqrt(np.sum(residuals**2) / (len(points) - UNKNOWNS[law.form])))
