"""The coordinate check: does training change activations equally at all widths and depths?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from examples.coordinate_check.coordinates import PLACES, measure
from examples.coordinate_check.sizes import Grid, Name, Size, check_config, resized
from pipeline.config.sections.run import Config

FLAT = 0.15
"""The largest slope of a flat line: a factor of 1.37 over eight times the size. The standard parametrization has slopes
of 0.3 to 1.2 (docs/how-to/parametrization.md)."""

STEP_TOKENS = 4096
"""Fewest tokens of a step, as many as in the paper's own check. With these and the architecture's default initial
values CompleteP was flat over depth as well (docs/how-to/parametrization.md)."""

MAY_SHRINK = ("queries", "MLP activations", "residual stream")
"""Places whose change may shrink with depth: differences between layers average out over more layers."""


@dataclass(frozen=True)
class Line:
    """The change of a place over one dimension.

    Attributes:
        parametrization: standard or completep.
        place: one of `PLACES`.
        dimension: width or depth.
        sizes: widths or depths, ascending.
        values: root mean square of the change at each size, over all seeds.
    """

    parametrization: Name
    place: str
    dimension: str
    sizes: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def slope(self) -> float:
        """Exponent of the least-squares power law through the values; NaN if a value is not positive and finite."""
        return slope(self.sizes, self.values)

    @property
    def flat(self) -> bool:
        """Whether the slope is within `FLAT` of 0, or the line `shrinks`; a single size has no slope, so it is flat."""
        return len(self.sizes) < 2 or abs(self.slope) <= FLAT or self.shrinks

    @property
    def shrinks(self) -> bool:
        """Whether the change shrinks with depth, at a place where it may."""
        return self.dimension == "depth" and self.place in MAY_SHRINK and self.slope < -FLAT


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Exponent p of the least-squares fit values ~ sizes^p in logarithms; NaN if a value has no logarithm."""
    if not all(0 < value < math.inf for value in values) or len(sizes) < 2:
        return math.nan
    x, y = [math.log(each) for each in sizes], [math.log(each) for each in values]
    mx, my = mean(x), mean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def coordinate_check(
    config: Config,
    grid: Grid,
    *,
    steps: int,
    seeds: int,
    step_tokens: int = STEP_TOKENS,
    parametrizations: Sequence[Name] = ("standard", "completep"),
    report: Callable[[str], None] = lambda _: None,
) -> list[Line]:
    """Trains the config at every size for a few steps, and measures how far activations move.

    Args:
        config: config with model.config, CompleteP and model.base.
        grid: widths and depths.
        steps: steps of each run.
        seeds: number of runs of each size; root mean squares are averaged over them.
        step_tokens: fewest tokens of each step.
        parametrizations: parametrizations to compare.
        report: function called with a line for each size.

    Raises:
        ConfigError: the config has no CompleteP rules, or a size is refused.
        TrainingError: a run has a non-finite loss.
    """
    base = check_config(config.model)
    config = config.model_copy(update={"scheduler": None})  # the full learning rate from the first step on
    for size in grid.sizes(base):  # refuses any size before the first is trained
        resized(config, size, parametrization="completep", lr=None, seed=0, steps=steps)
    lines: list[Line] = []
    for name in parametrizations:
        found: dict[Size, list[Mapping[str, float]]] = {}
        for size in grid.sizes(base):
            for seed in range(config.run.seed, config.run.seed + seeds):
                run = resized(
                    config, size, parametrization=name, lr=None, seed=seed, steps=steps, step_tokens=step_tokens
                )
                found.setdefault(size, []).append(measure(run))
            means = {place: _root_mean_square([each[place] for each in found[size]]) for place in PLACES}
            report(f"{name}, {size}: " + ", ".join(f"{place} {value:.3g}" for place, value in means.items()))
        blank = Line(name, "", "", (), ())
        for place in PLACES:
            for dimension, sizes, of in _dimensions(grid, base):
                values = tuple(_root_mean_square([each[place] for each in found[of(each)]]) for each in sizes)
                lines.append(replace(blank, place=place, dimension=dimension, sizes=sizes, values=values))
    return lines


def _dimensions(grid: Grid, base: Size) -> list[tuple[str, tuple[int, ...], Callable[[int], Size]]]:
    widths, depths = tuple(sorted(grid.widths)), tuple(sorted(grid.depths))
    return [
        ("width", widths, lambda width: Size(width, base.depth)),
        ("depth", depths, lambda depth: Size(base.width, depth)),
    ]


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(mean(value * value for value in values))
