"""Losses of a real ladder, and ladders made of a known law."""

from __future__ import annotations

import numpy as np

from pipeline.ladder.fit import Points

LAW = {"E": 1.6, "A": 40.0, "alpha": 0.27, "B": 70.0, "beta": 0.31}


def loss(parameters: float, tokens: float) -> float:
    """Of the known law."""
    return float(LAW["E"] + LAW["A"] / parameters ** LAW["alpha"] + LAW["B"] / tokens ** LAW["beta"])


def made(*, noise: float, seed: int = 0) -> tuple[Points, list[str]]:
    """Four sizes with three budgets each, with lognormal noise of a standard deviation."""
    random = np.random.default_rng(seed)
    pairs = [(n, n * ratio) for n in (1.2e5, 1.9e5, 3e5, 4.8e5) for ratio in (0.6, 1.2, 2.4)]
    losses = [loss(n, d) * float(np.exp(noise * random.standard_normal())) for n, d in pairs]
    parameters, tokens = np.array(pairs).T
    return Points(parameters, tokens, np.array(losses)), [f"run-{i}" for i in range(len(pairs))]
