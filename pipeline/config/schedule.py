"""Learning-rate schedules: the rate as a pure function of the step, set by the training loop on both engines.

DeepSpeed's three schedulers are reproduced step for step, including their start: DeepSpeed sets the minimum before the
first update and calls the scheduler after each update, so update n (from 1) uses the schedule's iteration n - 2.
Source: deepspeed 0.19.8 `runtime/lr_schedules.py`. There is one difference: an absent `warmup_max_lr` means the
optimizer's lr, whereas DeepSpeed's WarmupDecayLR silently takes 0.001.

WSD (warmup, stable, decay): linear from 0 to the peak over `warmup_num_steps`, constant, then linear to
`min_ratio` x peak over the last `decay_num_steps`. Source: Hu et al. 2024, MiniCPM (arXiv:2404.06395), section 4.

A schedule that counts tokens (`scheduler.count`) has the same formulas, of a number of steps that need not be whole:
the tokens up to a step, divided by those of the largest step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from foundation.errors import ConfigError
from pipeline.config.sections.deepspeed import SchedulerParams, SchedulerSection

_USES = {
    "WarmupLR": {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"},
    "WarmupDecayLR": {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"},
    "WarmupCosineLR": {"warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type", "total_num_steps"},
    "WSD": {"warmup_num_steps", "decay_num_steps", "min_ratio", "total_num_steps"},
}

_NOTHING = 1e-3
"""Share of the peak below which steps after the schedule's end learn nothing; DeepSpeed's cosine ends at 1e-4."""


@dataclass(frozen=True)
class Schedule:
    """A resolved learning-rate schedule: every number is known.

    Attributes:
        kind: constant, WarmupLR, WarmupDecayLR, WarmupCosineLR or WSD.
        peak: highest learning rate.
        floor: learning rate at the start of the warmup.
        warmup: steps of warmup.
        log_warmup: whether the warmup follows log(n) / log(warmup) instead of n / warmup.
        total: steps of the whole schedule.
        decay: steps of the final decay (WSD).
        end_ratio: final learning rate as a fraction of the peak (cosine, WSD).
        begin: number of steps of the run before the schedule's first step, where an earlier stage has another schedule.
        spans: (first step of the run, tokens under the schedule before it, tokens per step) of each span of equal
            steps, where the schedule counts tokens; empty where it counts steps.
    """

    kind: str
    peak: float
    floor: float = 0.0
    warmup: int = 0
    log_warmup: bool = True
    total: int = 0
    decay: int = 0
    end_ratio: float = 0.0
    begin: int = 0
    spans: Sequence[Sequence[int]] = ()

    def lr(self, step: int) -> float:
        """Returns the learning rate of update `step` of the run, counted from 1."""
        assert step > self.begin
        return _FORMULAS[self.kind](self, self._position(step))

    def _position(self, step: int) -> float:
        """Returns the number of steps up to a step; with spans in units of the largest step, by tokens."""
        if not self.spans:
            return step - self.begin
        first, before, tokens = self.spans[max(0, bisect_right(self.spans, step, key=lambda span: span[0]) - 1)]
        return (before + (step + 1 - first) * tokens) / max(each[2] for each in self.spans)

    def describe(self) -> dict[str, Any]:
        """Returns the numbers as plain JSON; `total` is None where the formula does not use it."""
        fields = {key: value for key, value in asdict(self).items() if key not in ("begin", "spans") or value}
        if self.spans:
            fields["spans"] = [list(span) for span in self.spans]
        return fields if self.kind in ("WarmupDecayLR", "WarmupCosineLR", "WSD") else {**fields, "total": None}


def make_schedule(section: SchedulerSection | None, *, lr: float, steps: int | None, begin: int = 0) -> Schedule:
    """Makes the learning-rate schedule of a `scheduler` section; constant without a section.

    Args:
        section: the config's `scheduler`.
        lr: the optimizer's learning rate.
        steps: length of the run in steps, or of the stages that share the schedule; None where it is unknown and the
            section has to give it.
        begin: number of steps of the run before the schedule's first.

    Raises:
        ConfigError: the chosen type does not use a parameter, warmup and decay are longer than the run, the length is
            missing, or `_checked` refuses the schedule.
    """
    if begin:
        return replace(make_schedule(section, lr=lr, steps=steps), begin=begin)
    if section is None:
        return Schedule("constant", lr)
    kind, params = section.type, section.params
    _refuse_unused(kind, params)
    total = params.total_num_steps or steps or 0
    if not total and kind != "WarmupLR":
        why = f"{kind} needs the length of the schedule"
        raise ConfigError("scheduler.params.total_num_steps", why=why, remedy="add it: the number of optimizer steps")
    if kind == "WSD":
        return _checked(_wsd(params, lr=lr, total=total), steps=steps)
    if params.warmup_num_steps == 0:
        why = f"{kind} has a warmup of at least 1 step"
        raise ConfigError("scheduler.params.warmup_num_steps", 0, why=why, remedy="use 1, or the type WSD")
    peak = params.warmup_max_lr or lr
    floor = params.warmup_min_lr or 0.0
    if kind == "WarmupCosineLR":
        floor = (params.warmup_min_ratio or 0.0) * peak
    warmup = max(2, params.warmup_num_steps or 1000)  # 1000 and the 2 are DeepSpeed's
    if kind != "WarmupLR" and warmup > total:
        why = f"the warmup is longer than the whole schedule of {total} steps"
        remedy = f"use at most {total}, e.g. {max(2, total // 20)}"
        raise ConfigError("scheduler.params.warmup_num_steps", params.warmup_num_steps or 1000, why=why, remedy=remedy)
    end = 0.0001 if params.cos_min_ratio is None else params.cos_min_ratio
    made = Schedule(kind, peak, floor, warmup, params.warmup_type != "linear", total, end_ratio=end)
    return _checked(made, steps=steps)


def _checked(made: Schedule, *, steps: int | None) -> Schedule:
    """Refuses a schedule with a minimum above its peak, or with steps after its end that learn nothing.

    Raises:
        ConfigError: the schedule has either fault.
    """
    if made.floor > made.peak:
        cosine = made.kind == "WarmupCosineLR"
        name, value = ("warmup_min_ratio", made.floor / made.peak) if cosine else ("warmup_min_lr", made.floor)
        why = f"the rate would begin above its peak of {made.peak:g}, and fall to it"
        remedy = "use at most 1, e.g. 0.1" if cosine else f"use at most {made.peak:g}, or raise optimizer.params.lr"
        raise ConfigError(f"scheduler.params.{name}", value, why=why, remedy=remedy)
    if made.kind in ("constant", "WarmupLR") or steps is None or steps <= made.total:
        return made
    if (last := made.lr(steps)) <= _NOTHING * made.peak:
        why = f"the run has {steps} steps, and after {made.total} the rate is {last:g}: nothing is learnt from there on"
        remedy = f"leave it out, which is the steps of the run, or set run.steps to {made.total}"
        raise ConfigError("scheduler.params.total_num_steps", made.total, why=why, remedy=remedy)
    return made


def _refuse_unused(kind: str, params: SchedulerParams) -> None:
    for name, value in params:
        if value is not None and name not in _USES[kind]:
            remedy = f"{kind} takes {', '.join(sorted(_USES[kind]))}"
            raise ConfigError(f"scheduler.params.{name}", value, why=f"{kind} has no such parameter", remedy=remedy)


def _wsd(params: SchedulerParams, *, lr: float, total: int) -> Schedule:
    warmup = max(1, total // 100) if params.warmup_num_steps is None else params.warmup_num_steps
    decay = max(1, total // 10) if params.decay_num_steps is None else params.decay_num_steps
    if warmup + decay > total:
        why = f"with decay_num_steps {decay} it is longer than the schedule of {total} steps"
        remedy = f"choose both so that their sum is at most {total}"
        raise ConfigError("scheduler.params.warmup_num_steps", warmup, why=why, remedy=remedy)
    return Schedule("WSD", lr, 0.0, warmup, False, total, decay, params.min_ratio or 0.0)


def _warmup_gamma(s: Schedule, iteration: float) -> float:
    """Computes DeepSpeed's warmup factor from 0 to 1; 0 before the first iteration."""
    if iteration < 0:
        return 0.0
    return math.log(iteration + 1) / math.log(s.warmup) if s.log_warmup else iteration / s.warmup


def _warmup_lr(s: Schedule, step: float) -> float:
    iteration = step - 2
    gamma = _warmup_gamma(s, iteration) if iteration < s.warmup else 1.0
    return s.floor + (s.peak - s.floor) * gamma


def _warmup_decay_lr(s: Schedule, step: float) -> float:
    iteration = step - 2
    if iteration < s.warmup:
        return _warmup_lr(s, step)
    gamma = max(0.0, (s.total - iteration) / max(1.0, s.total - s.warmup))
    return s.floor + (s.peak - s.floor) * gamma


def _warmup_cosine_lr(s: Schedule, step: float) -> float:
    iteration = step - 2
    if iteration < 0:
        return 0.0  # DeepSpeed's ratio before the start is 0, whatever warmup_min_ratio says
    if iteration < s.warmup:
        return s.floor + (s.peak - s.floor) * _warmup_gamma(s, iteration)
    progress = min(1.0, (iteration - s.warmup + 1) / max(1, s.total - s.warmup))
    return s.peak * max(0.0, s.end_ratio + (1 - s.end_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def _wsd_lr(s: Schedule, step: float) -> float:
    if step <= s.warmup:
        return s.peak * step / s.warmup
    left = s.total - step
    if left >= s.decay:
        return s.peak
    return s.peak * (s.end_ratio + (1 - s.end_ratio) * max(0, left) / s.decay)


_FORMULAS: dict[str, Callable[[Schedule, float], float]] = {
    "constant": lambda s, _step: s.peak,
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "WSD": _wsd_lr,
}
