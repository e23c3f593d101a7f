"""Losses of a real ladder, and ladders made of a known law."""

from __future__ import annotations

import numpy as np

from pipeline.plan.ladder.fit import Points

LAW = {"E": 1.6, "A": 40.0, "alpha": 0.27, "B": 70.0, "beta": 0.31}


def loss(parameters: float, tokens: float) -> float:
    return float(LAW["E"] + LAW["A"] / parameters ** LAW["alpha"] + LAW["B"] / tokens ** LAW["beta"])


def made(*, noise: float, seed: int = 0) -> tuple[Points, list[str]]:
    """Four sizes with three budgets each, with lognormal noise of a standard deviation."""
    random = np.random.default_rng(seed)
    pairs = [(n, n * ratio) for n in (1.2e5, 1.9e5, 3e5, 4.8e5) for ratio in (0.6, 1.2, 2.4)]
    losses = [loss(n, d) * float(np.exp(noise * random.standard_normal())) for n, d in pairs]
    parameters, tokens = np.array(pairs).T
    return Points(parameters, tokens, np.array(losses)), [f"run-{i}" for i in range(len(pairs))]


def real() -> tuple[Points, list[str]]:
    """The ladder of the demo's teacher, as docs/how-to/scaling-ladder.md has it."""
    parameters = np.repeat([115_452.0, 172_368.0, 238_500.0, 398_412.0], 3)
    tokens = [70_656, 141_312, 282_240, 105_472, 210_688, 421_632, 145_920, 291_840, 583_168, 243_712, 487_424, 974_720]
    losses = [5.7721, 5.2157, 4.7608, 5.6038, 5.0327, 4.5448, 5.2973, 4.8872, 4.4350, 5.0006, 4.4942, 4.0467]
    points = Points(parameters, np.array(tokens, dtype=np.float64), np.array(losses))
    return points, [f"run-{i}" for i in range(len(losses))]


def real_without_sweep() -> tuple[Points, list[str]]:
    """The earlier one with two budgets and the config's learning rate: the same page."""
    parameters = np.repeat([115_452.0, 172_368.0, 238_500.0, 398_412.0], 2)
    tokens = np.array([70_656, 141_312, 105_472, 210_688, 145_920, 291_840, 243_712, 487_424], dtype=np.float64)
    losses = np.array([6.0135, 5.4219, 5.6624, 5.2371, 5.3172, 4.9230, 5.0274, 4.5472])
    return Points(parameters, tokens, losses), [f"run-{i}" for i in range(len(losses))]
