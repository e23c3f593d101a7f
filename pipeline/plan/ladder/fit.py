"""Fits L = E + A / N^alpha + B / D^beta to the losses of a ladder's runs.

Hoffmann et al. 2022 (arXiv:2203.15556), section 3.3: minimizes the sum over the runs of the Huber loss, with delta
1e-3, of log L predicted less log L measured. The minimum is found by Levenberg-Marquardt steps with the weights that
the Huber loss gives each residual. All points of a starting grid and all bootstrap samples are fitted at once, in
float64.

With few runs the exponents can be fixed at those of Besiroglu et al. 2024 (arXiv:2404.10102): only E, A and B are
fitted.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Form = Literal["free exponents", "fixed exponents"]

DELTA = 1e-3
"""Delta of the Huber loss (Hoffmann et al., section 3.3)."""
FIXED = (0.3478, 0.3658)
"""alpha and beta by Besiroglu et al. 2024, table 1."""
UNKNOWNS: dict[Form, int] = {"free exponents": 5, "fixed exponents": 3}
"""Number of unknowns of each form."""
_ITERATIONS, _CONVERGED, _RESTS = 200, 1e-6, 8
"""Most steps; relative decrease of an objective that counts as progress; steps without progress that end a search."""
_LOWEST = np.array([-8.0, -8.0, -8.0, 0.02, 0.02])
_HIGHEST = np.array([4.0, 4.0, 4.0, 2.5, 2.5])
"""Limits of log E, of the logs of both terms at the runs' mean N and D (nats per token), and of both exponents."""


@dataclass(frozen=True)
class Points:
    """Finished runs: parameters N, tokens D and held-out loss in nats per token, float64 [runs] each."""

    parameters: Array
    tokens: Array
    losses: Array

    def take(self, index: npt.NDArray[np.intp]) -> Points:
        """Selects runs by index."""
        return Points(self.parameters[index], self.tokens[index], self.losses[index])

    def __len__(self) -> int:
        return int(self.losses.size)


@dataclass(frozen=True)
class Laws:
    """Fitted laws, one per row of weights.

    Attributes:
        form: form of the laws, by the unknowns that were fitted.
        center: log N and log D at which the values state both terms.
        values: float64 [laws, 5]: log E, logs of both terms at the center, alpha, beta.
    """

    form: Form
    center: tuple[float, float]
    values: Array

    def predict(self, parameters: float | Array, tokens: float | Array) -> Array:
        """Loss in nats per token, float64 [laws] or [laws, runs]."""
        n = np.log(np.atleast_1d(np.asarray(parameters, dtype=np.float64))) - self.center[0]
        d = np.log(np.atleast_1d(np.asarray(tokens, dtype=np.float64))) - self.center[1]
        found: Array = _terms(self.values, n, d).sum(axis=0)
        return found[:, 0] if np.ndim(parameters) == 0 else found

    def described(self) -> dict[str, float]:
        """E, A, alpha, B and beta of the first law."""
        e, a, b, alpha, beta = (float(value) for value in self.values[0])
        return {
            "E": float(np.exp(e)),
            "A": float(np.exp(a + alpha * self.center[0])),
            "alpha": alpha,
            "B": float(np.exp(b + beta * self.center[1])),
            "beta": beta,
        }


def can_fit(points: Points, form: Form) -> bool:
    """Whether there are more runs than unknowns, and N and D have three values each (two with fixed exponents)."""
    values = 3 if form == "free exponents" else 2
    sizes, budgets = np.unique(points.parameters).size, np.unique(points.tokens).size
    return len(points) > UNKNOWNS[form] and min(sizes, budgets) >= values


def fit(points: Points, form: Form, *, weights: Array | None = None, start: Laws | None = None) -> Laws:
    """Fits the law with the smallest Huber loss.

    Args:
        points: the runs.
        form: form of the law; with "fixed exponents" alpha and beta are `FIXED`.
        weights: float64 [laws, runs], how often each run counts; None for one law of all runs.
        start: a law to start from, beside the coarser points of the grid.
    """
    weights = np.ones((1, len(points))) if weights is None else weights
    n, d = np.log(points.parameters), np.log(points.tokens)
    center = (float(n.mean()), float(d.mean())) if start is None else start.center
    starts = _starts(points, form) if start is None else np.concatenate([start.values[:1], _starts(points, form)[1::9]])
    laws, count = len(weights), len(starts)
    values, costs = _minimize(
        np.tile(starts, (laws, 1)),
        np.repeat(weights, count, axis=0),
        (n - center[0], d - center[1], np.log(points.losses)),
        unknowns=UNKNOWNS[form],
    )
    best = costs.reshape(laws, count).argmin(axis=1)
    return Laws(form, center, values.reshape(laws, count, 5)[np.arange(laws), best])


def huber(laws: Laws, points: Points) -> float:
    """The first law's objective: the sum of the runs' Huber losses of log residuals."""
    residuals = np.log(laws.predict(points.parameters, points.tokens)[0]) - np.log(points.losses)
    return float(_huber(residuals).sum())


def _starts(points: Points, form: Form) -> Array:
    """Float64 [starts, 5]: E is a share of the smallest loss, both terms share the rest equally; several exponents."""
    lowest, mean = float(points.losses.min()), float(points.losses.mean())
    exponents = (0.15, 0.35, 0.8)
    pairs = list(itertools.product(exponents, exponents)) if form == "free exponents" else [FIXED]
    rows = []
    for share, (alpha, beta) in itertools.product((0.2, 0.5, 0.8), pairs):
        rest = np.log(max(mean - share * lowest, 1e-3) / 2)
        rows.append([np.log(share * lowest), rest, rest, alpha, beta])
    return np.array(rows)


def _terms(values: Array, n: Array, d: Array) -> Array:
    """Float64 [3, laws, runs]: E and both terms, from centered log N and log D [runs]."""
    e, a, b, alpha, beta = (values[:, i, None] for i in range(5))
    found: Array = np.exp(np.stack([e + 0 * n, a - alpha * n, b - beta * d]))
    return found


def _minimize(values: Array, weights: Array, data: tuple[Array, Array, Array], *, unknowns: int) -> tuple[Array, Array]:
    """Levenberg-Marquardt from all rows of `values` [rows, 5] at once; returns values and costs [rows]."""
    n, d, logs = data

    def residuals(values: Array) -> Array:
        found: Array = np.log(_terms(values, n, d).sum(axis=0)) - logs
        return found

    damping = np.full(len(values), 1e-2)
    at = residuals(values)
    costs = (weights * _huber(at)).sum(axis=1)
    rest = 0
    for _ in range(_ITERATIONS):
        terms = _terms(values, n, d)
        shares = terms / terms.sum(axis=0)
        columns = [shares[0], shares[1], shares[2], -shares[1] * n, -shares[2] * d]
        jacobian = np.stack(columns[:unknowns], axis=-1)  # [rows, runs, unknowns]
        weighted = jacobian * (weights * np.minimum(1.0, DELTA / np.maximum(np.abs(at), 1e-300)))[..., None]
        matrix = np.einsum("rik,ril->rkl", weighted, jacobian)
        diagonal = np.einsum("rkk->rk", matrix) * damping[:, None] + 1e-12
        matrix[:, np.arange(unknowns), np.arange(unknowns)] += diagonal
        step = np.linalg.solve(matrix, np.einsum("rik,ri->rk", weighted, at)[..., None])[..., 0]
        moved = values.copy()
        moved[:, :unknowns] -= np.clip(step, -1.0, 1.0)
        moved = np.clip(moved, _LOWEST, _HIGHEST)
        new = residuals(moved)
        new_costs = (weights * _huber(new)).sum(axis=1)
        better = new_costs < costs
        gained = float(np.max((costs - new_costs) / np.maximum(costs, 1e-300)))
        values[better], at[better], costs[better] = moved[better], new[better], new_costs[better]
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-9, 1e9)
        rest = rest + 1 if gained < _CONVERGED else 0
        if rest == _RESTS:
            break
    return values, costs


def _huber(residuals: Array) -> Array:
    size = np.abs(residuals)
    found: Array = np.where(size <= DELTA, 0.5 * size**2, DELTA * (size - 0.5 * DELTA))
    return found
