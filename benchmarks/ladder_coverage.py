"""How often the interval of `headrace ladder` holds the large run's loss, for ladders made from known laws with noise.

    python -m benchmarks.ladder_coverage --ladders 200 --noise 0.005

Each ladder has its own law: exponents, E and both terms are drawn uniformly from `--exponents` and the ranges below.
The fixed exponents are then as wrong as they may be on real data. Rungs are spaced evenly in log N from 1/4 of the
largest to the largest. The large run has `--times` the largest rung's parameters and as many tokens per parameter.
Every loss, also the large run's, has lognormal noise. Ladders that `judge` refuses to extrapolate are counted, and have
no interval.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import make_parser
from pipeline.plan.ladder.fit import Points
from pipeline.plan.ladder.prediction import PredictionVerdict, judge

LARGEST_N, TOKENS_PER_PARAMETER = 4e5, 2.0
E_RANGE, TERM_RANGE = (1.5, 2.5), (0.3, 1.5)
"""Ranges of E and of the terms at the largest rung, in nats per token."""


def made_ladder(
    random: np.random.Generator,
    *,
    noise: float,
    rungs: int,
    budgets: tuple[float, ...],
    times: float,
    exponents: tuple[float, float],
) -> tuple[Points, float]:
    """Makes the runs of a ladder, and the loss of its large run."""
    alpha, beta = random.uniform(*exponents, 2)
    lowest = random.uniform(*E_RANGE)
    by_size, by_tokens = random.uniform(*TERM_RANGE, 2)
    n = np.append(np.repeat(np.geomspace(1 / 4, 1, rungs), len(budgets)), times)
    d = n * np.append(np.tile(budgets, rungs), 1.0)
    losses = (lowest + by_size * n**-alpha + by_tokens * d**-beta) * np.exp(noise * random.standard_normal(n.size))
    points = Points(n[:-1] * LARGEST_N, d[:-1] * LARGEST_N * TOKENS_PER_PARAMETER, losses[:-1])
    return points, float(losses[-1])


def judged(points: Points, *, times: float) -> PredictionVerdict:
    """The ladder's verdict on a run with `times` the largest rung's parameters."""
    names = [f"run-{number}" for number in range(len(points))]
    n = times * LARGEST_N
    return judge(points, names, parameters=n, tokens=n * TOKENS_PER_PARAMETER, tolerance=0.02)


def main() -> None:
    """Prints the share of intervals that hold the loss, their width, and the share of ladders without an interval."""
    parser = make_parser(__doc__)
    parser.add_argument("--ladders", type=int, default=200)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.005], help="standard deviation of a log loss")
    parser.add_argument("--rungs", type=int, default=4)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 1, 2])
    parser.add_argument("--times", type=float, nargs="+", default=[4.0], help="N of it by the largest rung's")
    parser.add_argument("--exponents", type=float, nargs=2, default=[0.25, 0.5], help="range of alpha and beta")
    arguments = parser.parse_args()
    for noise in arguments.noise:
        for times in arguments.times:
            fields = {"rungs": arguments.rungs, "budgets": tuple(arguments.budgets)}
            _report(arguments.ladders, noise=noise, times=times, exponents=tuple(arguments.exponents), **fields)


def _report(ladders: int, *, noise: float, times: float, **fields: Any) -> None:
    hits, widths, errors = [], [], []
    for seed in range(ladders):
        points, truth = made_ladder(np.random.default_rng(seed), noise=noise, times=times, **fields)
        found = judged(points, times=times).prediction
        if found is not None:
            hits.append(found.low <= truth <= found.high)
            widths.append((found.high - found.low) / 2 / found.loss)
            errors.append(math.log(found.loss / truth))
    count = len(hits)
    share = sum(hits) / count
    print(
        f"noise {noise:.1%}, {times:g} x N: {count} of {ladders} predicted, the interval holds {share:.1%}"
        f" (+-{math.sqrt(share * (1 - share) / count):.1%}), half-width {median(widths):.1%} (median), error"
        f" {math.sqrt(sum(each * each for each in errors) / count):.1%} (root mean square)",
        flush=True,
    )


if __name__ == "__main__":
    main()
