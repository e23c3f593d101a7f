"""How much of each source a run draws: weights, budgets in epochs or tokens, stages, and limits on repetition."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import ConfigError
from pipeline.config.schema import DataSection
from pipeline.data.order import BLOCK, SampleOrder, Stage


@dataclass(frozen=True)
class Extent:
    """How long a run is: `steps` of `per_step` samples each."""

    steps: int
    per_step: int

    @property
    def samples(self) -> int:
        """Samples of the whole run."""
        return self.steps * self.per_step


def make_order(data: DataSection, windows: Sequence[int], *, seed: int, extent: Extent | None) -> SampleOrder:
    """The order of a run's samples.

    Args:
        data: the config's section.
        windows: of each source.
        seed: the run's.
        extent: of the run; needed for stages, budgets and limits.

    Raises:
        ConfigError: budgets and the run's length do not fit each other, or a source would be seen too often.
        DataError: see `SampleOrder`.
    """
    stages = [Stage(0, tuple(source.weight or 1.0 for source in data.sources))]
    if data.schedule is not None:
        assert extent is not None, "stages are counted in steps"
        named = [(stage.after_step * extent.per_step, stage.weights) for stage in data.schedule]
        stages = [Stage(start, tuple(weights[name] for name in data.names)) for start, weights in named]
    elif any(source.epochs or source.tokens for source in data.sources):
        assert extent is not None, "what share a budget is depends on the length of the run"
        stages = [Stage(0, _shares(data, windows, extent))]
    order = SampleOrder(windows, weights=stages[0].weights, seed=seed, later=stages[1:])
    if extent is not None:
        _check_limits(data, order, extent)
    return order


def _shares(data: DataSection, windows: Sequence[int], extent: Extent) -> tuple[float, ...]:
    """Samples of each source: those of the budgets, and of the others what is left, by weight."""
    budgets = [
        source.epochs * size if source.epochs else source.tokens / data.sequence_length if source.tokens else None
        for source, size in zip(data.sources, windows, strict=True)
    ]
    fixed = sum(budget for budget in budgets if budget is not None)
    rest, weights = extent.samples - fixed, [source.weight or 1.0 for source in data.sources]
    open_ = sum(weight for weight, budget in zip(weights, budgets, strict=True) if budget is None)
    if rest < -extent.per_step or (rest > extent.per_step and not open_) or (open_ and rest <= 0):
        wanted, length = round(fixed * data.sequence_length), extent.samples * data.sequence_length
        why = f"the budgets of data.sources are {wanted:,} tokens, the run has {length:,}"
        more = "" if open_ else ", or give one source a weight in place of its budget"
        raise ConfigError("data.sources", why=why, remedy=f"run.tokens {wanted:,}{' or more' if open_ else ''}{more}")
    return tuple(
        budget if budget is not None else rest * weight / open_ for weight, budget in zip(weights, budgets, strict=True)
    )


def _check_limits(data: DataSection, order: SampleOrder, extent: Extent) -> None:
    # weights are honoured to one part in BLOCK: a limit that is met exactly must not fail for that
    slack = extent.samples / BLOCK + 1
    drawn = order.drawn(extent.samples)
    for number, source in enumerate(data.sources):
        if source.max_epochs is None:
            continue
        size, most = int(order.windows[number]), source.max_epochs * int(order.windows[number]) + slack
        if drawn[number] > most:
            why = f"{data.names[number]} would be seen {drawn[number] / size:.2f} times in {extent.steps:,} steps"
            remedy = _what_fits(data, order, extent, number=number, most=most)
            raise ConfigError(f"data.sources.{number}.max_epochs", source.max_epochs, why=why, remedy=remedy)


def _what_fits(data: DataSection, order: SampleOrder, extent: Extent, *, number: int, most: float) -> str:
    def drawn(step: int) -> int:
        return int(order.drawn(step * extent.per_step)[number])

    source, fits = data.sources[number], []
    steps = bisect_right(range(extent.steps + 1), most, key=drawn) - 1
    if steps:
        fits.append(f"run.steps {steps:,} or less")
    others = sum(s.weight or 1.0 for i, s in enumerate(data.sources) if i != number)
    budgets = any(s.epochs or s.tokens for s in data.sources)
    if others and not data.schedule and not budgets and most < extent.samples:
        weight = others * (most - 1) / (extent.samples - most + 1)
        fits.append(f"data.sources.{number}.weight {_rounded_down(weight)} or less")
    if data.schedule:
        fits.append(f"a smaller weight of '{data.names[number]}' in data.schedule")
    if source.epochs or source.tokens:
        fits.append(f"a smaller budget than {'epochs' if source.epochs else 'tokens'} {source.epochs or source.tokens}")
    return ", or ".join([*fits, f"max_epochs {drawn(extent.steps) / int(order.windows[number]):.2f}"])


def _rounded_down(value: float) -> str:
    return f"{value * (1 - 1e-3):.3g}"
