"""Weights of the checkpoints in a merge: mean, EMA, WSM, or given ones.

WSM (Tian et al. 2025, arXiv:2507.17634, section 3): let a run go from checkpoint 0 to checkpoint k with a constant
rate, and let u_i be its update between checkpoints i - 1 and i, so that checkpoint j is x_j = x_0 + u_1 + ... + u_j.
With coefficients c_0 + ... + c_k = 1 the merged weights are

    c_0 x_0 + ... + c_k x_k = x_0 + w_1 u_1 + ... + w_k u_k    with w_i = c_i + c_(i+1) + ... + c_k,

that is the weights after a run whose rate was multiplied by w_i in interval i, if its updates had pointed the same way.
A decay of the rate by factors 1 >= w_1 >= ... >= w_k >= 0 is thus the merge with

    c_0 = 1 - w_1,    c_j = w_j - w_(j+1),    c_k = w_k.

Here w_i = f(t_i) for the shape f of the decay, from f(0) = 1 to f(1) = 0. The decay begins at checkpoint 0 and would
end one mean interval after checkpoint k: t_i = (s_i - s_0) / ((s_k - s_0) (k + 1) / k), with steps s. For checkpoints
at equal distances t_i = i / (k + 1), and a linear decay is the plain mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from foundation.errors import ConfigError

METHODS = ("mean", "ema", "wsm", "linear")
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "1-sqrt": lambda t: 1 - math.sqrt(t),
}
"""Shape of a decay -> factor on the rate at the fraction t of the decay."""
_EMA = 0.5
"""Default decay of an EMA over checkpoints: half of the weight is the newest checkpoint's."""


@dataclass(frozen=True)
class MergeMethod:
    """How checkpoints are weighted.

    Attributes:
        name: one of `METHODS`.
        weights: the coefficients themselves, for `linear`; [] otherwise.
        shape: one of `SHAPES`, for `wsm`.
        ema: share of the average that stays at each further checkpoint, for `ema`.
    """

    name: str
    weights: Sequence[float] = ()
    shape: str = "linear"
    ema: float = _EMA

    def coefficients(self, steps: Sequence[int]) -> list[float]:
        """Returns the coefficient of every checkpoint, given their steps in the order of the merge; their sum is 1.

        Raises:
            ConfigError: the number or the sum of given weights is wrong, or the method needs steps that increase.
        """
        if self.name in ("ema", "wsm") and any(later <= earlier for earlier, later in pairwise(steps)):
            why = f"it weights checkpoints of one run by their order, and these are of steps {_listed(steps)}"
            raise ConfigError("--method", self.name, why=why, remedy="merge one run, or use mean or linear")
        if self.name == "mean":
            return [1 / len(steps)] * len(steps)
        if self.name == "linear":
            return self._given(len(steps))
        return self._of_ema(len(steps)) if self.name == "ema" else self._of_decay(steps)

    def _given(self, count: int) -> list[float]:
        total = math.fsum(self.weights)
        if len(self.weights) != count:
            why = f"there are {len(self.weights)} weights for {count} checkpoints"
            raise ConfigError("--weights", _listed(self.weights), why=why, remedy="give one weight per checkpoint")
        if not math.isclose(total, 1, abs_tol=1e-6):
            why, remedy = (
                f"their sum is {total:g}, which would scale every weight of the model",
                "weights whose sum is 1",
            )
            if total > 0:
                remedy = f"use {_listed([float(f'{each / total:.6g}') for each in self.weights])}"
            raise ConfigError("--weights", _listed(self.weights), why=why, remedy=remedy)
        return [each / total for each in self.weights]

    def _of_ema(self, count: int) -> list[float]:
        powers = [self.ema ** (count - 1 - place) for place in range(count)]
        return [powers[0], *((1 - self.ema) * each for each in powers[1:])]

    def _of_decay(self, steps: Sequence[int]) -> list[float]:
        last = len(steps) - 1
        span = (steps[-1] - steps[0]) * (last + 1) / last if last else 1
        factors = [SHAPES[self.shape]((step - steps[0]) / span) for step in steps] + [0.0]
        return [earlier - later for earlier, later in pairwise(factors)]


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" if isinstance(value, float) else f"{value}" for value in values)
