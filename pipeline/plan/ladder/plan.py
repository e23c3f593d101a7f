"""Plans the runs of a ladder: sizes, token budgets, and a config for each run with its own batch and learning rate.

A rung is a model size. Each rung is trained with several token budgets, each with a full schedule: a run that is cut
short has not decayed its learning rate, and its loss says nothing about a shorter run (Hoffmann et al. 2022,
arXiv:2203.15556, section 3.1).

Batch and learning rate follow the exponents of Step Law (arXiv:2503.04715), from the large run's values: B ~ D^0.571,
lr ~ N^-0.713 D^0.307. The warm-up is the same share of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from foundation.configfile import ConfigTree, merge
from foundation.errors import ConfigError
from pipeline.models.resize.scale import scale, section_of
from pipeline.plan.ladder.large_run import LargeRun, ModelCounts
from pipeline.plan.laws.laws import step_law_batch, step_law_learning_rate

_FEWEST_RUNGS = 3
_ABOVE_LARGEST = 1.25
"""Most parameters of the largest rung over the number asked for, where no size is nearer."""
_TRIALS = 40
_FEWEST_STEPS = 20
_CHECKPOINTS = 4
"""Checkpoints of a run, the last one included."""


@dataclass(frozen=True)
class Options:
    """Options of a ladder.

    Attributes:
        rungs: number of model sizes.
        smallest, largest: parameters of the smallest and largest size, as shares of the large run's.
        budgets: tokens of each rung's runs, as multiples of the large run's tokens per parameter.
        learning_rates: number of learning rates of the sweep on the smallest rung, each twice the one before; 1 for no
            sweep.
        seeds: number of runs of each size and budget, with seeds from run.seed on.
    """

    rungs: int = 4
    smallest: float = 1 / 32
    largest: float = 1 / 8
    budgets: tuple[float, ...] = (0.5, 1.0, 2.0)
    learning_rates: int = 5
    seeds: int = 1

    def check(self) -> None:
        """Refuses options that give no ladder.

        Raises:
            ConfigError: an option is refused; the error names it.
        """
        if self.rungs < _FEWEST_RUNGS:
            why = "two sizes determine no law: any law would fit their losses"
            raise ConfigError("--rungs", self.rungs, why=why, remedy=f"{_FEWEST_RUNGS} or more")
        if not 0 < self.smallest < self.largest < 1:
            why = "they are shares of the large model's parameters, the smaller one first"
            raise ConfigError("--smallest / --largest", (self.smallest, self.largest), why=why, remedy="0.03 and 0.125")
        if len(set(self.budgets)) < 2 or min(self.budgets) <= 0:
            why = "the loss over tokens needs two budgets or more"
            raise ConfigError("--budgets", self.budgets, why=why, remedy="0.5,1,2")
        if self.learning_rates < 1 or self.learning_rates % 2 == 0:
            why = "the config's own rate is in the middle"
            raise ConfigError("--learning-rates", self.learning_rates, why=why, remedy="5, or 1 for no sweep")
        if self.seeds < 1:
            raise ConfigError("--seeds", self.seeds, why="there is no run without one", remedy="1 or more")


@dataclass(frozen=True)
class Rung:
    """A model size of a ladder."""

    model: PretrainedConfig
    counts: ModelCounts

    @property
    def name(self) -> str:
        """Name of the rung: width x layers."""
        return f"{self.model.hidden_size}x{self.model.num_hidden_layers}"


@dataclass(frozen=True)
class LadderRun:
    """One run of a ladder.

    Attributes:
        rung: model size.
        tokens: training tokens (D), a whole number of steps.
        learning_rate: peak learning rate.
        samples: samples per step.
        steps: optimizer steps.
        seed: value of run.seed.
        swept: whether the run is for the sweep alone.
    """

    rung: Rung
    tokens: int
    learning_rate: float
    samples: int
    steps: int
    seed: int
    swept: bool = False

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return f"{self.rung.name}-{self.tokens}-lr{self.learning_rate:.3g}-seed{self.seed}"

    @property
    def flops(self) -> float:
        """FLOPs of the whole training."""
        return self.rung.counts.flops_per_token * self.tokens


@dataclass(frozen=True)
class Ladder:
    """A planned ladder.

    Attributes:
        large: the run whose loss is predicted.
        options: options of the ladder.
        rungs: model sizes, from the smallest to the largest.
        output: directory of all runs and results.
    """

    large: LargeRun
    options: Options
    rungs: tuple[Rung, ...]
    output: Path

    def runs(self, factor: float = 1.0) -> list[LadderRun]:
        """The runs to fit, smallest first, at the scaled learning rate times a factor."""
        seeds = range(self.large.run.config.run.seed, self.large.run.config.run.seed + self.options.seeds)
        return [
            self._run(rung, budget, factor=factor, seed=seed)
            for rung in self.rungs
            for budget in self.options.budgets
            for seed in seeds
        ]

    def sweep(self, exponents: range | None = None) -> list[LadderRun]:
        """The smallest rung at several learning rates, with the large run's tokens per parameter.

        Args:
            exponents: exponents of the powers of two by which the scaled learning rate is multiplied; None for those of
                the options.
        """
        reach = self.options.learning_rates // 2
        seed = self.large.run.config.run.seed
        return [
            replace(self._run(self.rungs[0], 1.0, factor=2.0**exponent, seed=seed), swept=True)
            for exponent in exponents or range(-reach, reach + 1)
        ]

    def config(self, run: LadderRun) -> ConfigTree:
        """The training config of a run."""
        large = self.large
        share, given = run.steps / large.run.steps, large.flat["model"]
        micro = next(m for m in range(min(run.samples, large.run.batch.micro), 0, -1) if run.samples % m == 0)
        every = max(1, math.ceil(run.steps / _CHECKPOINTS))
        section = {k: v for k, v in (large.flat.get("run") or {}).items() if k not in _OF_THE_LENGTH}
        fixed = {
            "train_batch_size": run.samples,
            "train_micro_batch_size_per_gpu": micro,
            "optimizer": {"params": large.run.config.optimizer.params.rates_at(run.learning_rate)},
        }
        replaced = {
            "model": {**_kept(given), "config": section_of(run.rung.model, large.model, given.get("config"))},
            "run": {
                **section,
                "dir": str(self.run_dir(run)),
                "steps": run.steps,
                "seed": run.seed,
                "checkpoint_every": every,
                "keep_checkpoints": 1,
            },
            "evaluation": {**(large.flat.get("evaluation") or {}), "every": None},
        }
        if large.flat.get("scheduler"):
            replaced["scheduler"] = _scheduler(large, share)
        return {**merge(dict(large.flat), fixed), **replaced}

    def run_dir(self, run: LadderRun) -> Path:
        """A run's directory."""
        return self.output / "runs" / run.name

    def flops(self) -> float:
        """FLOPs of all runs and of the sweep, each run counted once."""
        found = {run.name: run.flops for run in [*self.sweep(), *self.runs()]}
        return sum(found.values())

    def _run(self, rung: Rung, budget: float, *, factor: float, seed: int) -> LadderRun:
        large = self.large
        wanted = budget * large.tokens / large.counts.multiplied * rung.counts.multiplied
        length = large.run.batch.sequence_length
        samples = max(1, round(large.run.batch.samples * step_law_batch(wanted) / step_law_batch(large.tokens)))
        steps = round(wanted / (samples * length))
        if steps < _FEWEST_STEPS:
            why = f"{rung.name} would train {steps} steps, and a law of unfinished warm-ups says nothing"
            raise ConfigError("--smallest", self.options.smallest, why=why, remedy="a larger share, or a longer run")
        tokens = steps * samples * length
        here = step_law_learning_rate(rung.counts.body, tokens)
        there = step_law_learning_rate(large.counts.body, large.tokens)
        peak = float(f"{large.run.config.optimizer.params.lr * here / there * factor:.3g}")
        return LadderRun(rung, tokens, peak, samples, steps, seed)


_OF_THE_LENGTH = ("tokens", "keep_every", "checkpoint_minutes", "allow_change")


def plan_ladder(large: LargeRun, options: Options, output: Path) -> Ladder:
    """Chooses the sizes of a ladder.

    Raises:
        ConfigError: the architecture cannot be scaled, or has too few sizes between the smallest and the largest.
    """
    options.check()
    spread = [
        options.smallest * (options.largest / options.smallest) ** (i / (options.rungs - 1))
        for i in range(options.rungs)
    ]
    sizes = list(_sizes(large))
    rungs = _chosen(sizes, [share * large.counts.multiplied for share in spread])
    if len(rungs) < options.rungs:
        found = ", ".join(f"{rung.name} ({rung.counts.multiplied / large.counts.multiplied:.1%})" for rung in sizes)
        why = f"only {len(rungs)} sizes of this architecture are near them; there are {found}"
        remedy = "other shares, fewer --rungs, or a large model with more key/value heads"
        raise ConfigError("--smallest / --largest", (options.smallest, options.largest), why=why, remedy=remedy)
    ladder = Ladder(large, options, tuple(rungs), output)
    ladder.runs()  # refuses a run with too few steps
    return ladder


def _sizes(large: LargeRun) -> Iterator[Rung]:
    """All smaller sizes, smallest first."""
    found: dict[str, Rung] = {}
    for number in range(1, _TRIALS):
        model = scale(large.model, number / _TRIALS)
        rung = Rung(model, large.count(model)) if f"{model.hidden_size}" not in found else None
        if rung is not None and rung.counts.multiplied < large.counts.multiplied:
            found[f"{model.hidden_size}"] = rung
    yield from sorted(found.values(), key=lambda rung: rung.counts.multiplied)


def _chosen(sizes: list[Rung], wanted: list[float]) -> list[Rung]:
    """Chooses the nearest size to each wanted number of parameters, above the size before; fewer if sizes run out."""
    found: list[Rung] = []
    for parameters in wanted:
        last, most = found[-1].counts.multiplied if found else 0, _ABOVE_LARGEST * wanted[-1]
        left = [rung for rung in sizes if last < rung.counts.multiplied <= most]
        if not left:
            break
        found.append(min(left, key=lambda rung: abs(math.log(rung.counts.multiplied / parameters))))
    return found


def _kept(section: Mapping[str, Any]) -> ConfigTree:
    return {key: value for key, value in section.items() if key not in ("path", "fresh", "keep_layers")}


def _scheduler(large: LargeRun, share: float) -> ConfigTree:
    """The scheduler section, with its step counts at the same share of the run."""
    section, schedule = large.flat["scheduler"], large.run.schedule
    params = {key: value for key, value in section.get("params", {}).items() if key != "warmup_max_lr"}
    params["warmup_num_steps"] = max(2, round(schedule.warmup * share)) if schedule.warmup else 0
    for key in ("decay_num_steps", "total_num_steps"):
        if params.get(key) is not None:
            params[key] = max(2, round(params[key] * share))
    return {**section, "params": params}
