"""A learning-rate sweep at several widths and depths: does the best rate stay the same?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from examples.coordinate_check.coordinates import begin, losses
from examples.coordinate_check.sizes import Grid, Name, Size, check_config, resized
from foundation.errors import TrainingError
from pipeline.config.sections.run import Config

LAST = 0.1
"""Share of the steps, at the end, over which the training loss is averaged: every step has new samples."""


@dataclass(frozen=True)
class Sweep:
    """Final losses of one size under one parametrization.

    Attributes:
        parametrization: standard or completep.
        size: width and depth of the model.
        rates: peak learning rates, ascending.
        losses: final loss of each rate, nats per token, mean over the last steps and all seeds; infinite if a run
            diverged.
    """

    parametrization: Name
    size: Size
    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def best(self) -> float:
        """The rate with the lowest loss."""
        return min(zip(self.losses, self.rates, strict=True))[1]


def sweep(
    config: Config,
    *,
    grid: Grid,
    rates: Sequence[float],
    steps: int,
    seeds: int,
    report: Callable[[str], None] = lambda _: None,
) -> list[Sweep]:
    """Trains every size at every rate, with the config's schedule.

    At the base model's size both parametrizations are the same run, which is trained once.

    Raises:
        ConfigError: the config has no CompleteP rules, or a size is refused.
    """
    base = check_config(config.model)
    rates = tuple(sorted(rates))
    for size in grid.sizes(base):
        resized(config, size, parametrization="completep", lr=None, seed=0, steps=steps)
    found: list[Sweep] = []
    for size in grid.sizes(base):
        names: tuple[Name, ...] = ("standard", "completep")
        for name in names:
            same = [each for each in found if each.size == size] if size == base else []
            values = same[0].losses if same else _losses(config, size, name, rates, steps, seeds, report)
            found.append(Sweep(name, size, rates, values))
    return found


def _losses(
    config: Config,
    size: Size,
    name: Name,
    rates: Sequence[float],
    steps: int,
    seeds: int,
    report: Callable[[str], None],
) -> tuple[float, ...]:
    values = []
    for rate in rates:
        each = [_final_loss(config, size, name, rate, steps, config.run.seed + number) for number in range(seeds)]
        values.append(mean(each))
        report(f"{name}, {size}, learning rate {rate:.3g}: loss {values[-1]:.4f}")
    return tuple(values)


def _final_loss(config: Config, size: Size, name: Name, rate: float, steps: int, seed: int) -> float:
    run = resized(config, size, parametrization=name, lr=rate, seed=seed, steps=steps)
    try:
        all_losses = list(losses(*begin(run)))
    except TrainingError:
        return math.inf
    return mean(all_losses[-max(1, round(LAST * steps)) :])
