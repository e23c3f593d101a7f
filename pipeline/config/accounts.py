"""Samples and tokens of every step of a run, in closed form: a pure function of its config.

A run is a list of spans: consecutive steps of one stage with equal batch size and sequence length. A run without stages
and without a ramp has one span. A batch ramp has one span per batch size. Everything that counts or looks up steps uses
`StepAccounts`; nothing loops over steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from foundation.errors import ConfigError
from pipeline.config.sections.stages import BatchRampSection, UntilSection


@dataclass(frozen=True)
class StepSpan:
    """Consecutive steps with equal batches.

    Attributes:
        stage: number of the stage, from 0.
        first_step: first step of the span, from 1.
        samples_before, tokens_before: samples and tokens of the run before the span.
        samples: samples per step.
        sequence_length: tokens per sample.
    """

    stage: int
    first_step: int
    samples_before: int
    tokens_before: int
    samples: int
    sequence_length: int

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.samples * self.sequence_length


@dataclass(frozen=True)
class StepAccounts:
    """Samples and tokens before, in and after any step.

    Attributes:
        spans: spans in order, at least one; the last one covers all later steps.
        steps: steps of the whole run.
        names: name of each stage; one empty name for a run without stages.
    """

    spans: tuple[StepSpan, ...]
    steps: int
    names: tuple[str, ...] = ("",)

    @classmethod
    def constant(cls, samples: int, sequence_length: int, steps: int) -> StepAccounts:
        """Returns the accounts of a run whose steps are all alike."""
        return cls((StepSpan(0, 1, 0, 0, samples, sequence_length),), steps)

    @cached_property
    def _first_steps(self) -> list[int]:
        return [span.first_step for span in self.spans]

    @property
    def constant_batch(self) -> bool:
        """Whether all steps have the same number of samples and tokens."""
        return len(self.spans) == 1

    def span(self, step: int) -> StepSpan:
        """Returns the span of a step, counted from 1."""
        return self.spans[max(0, bisect_right(self._first_steps, step) - 1)]

    def samples_in(self, step: int) -> int:
        """Samples of a step."""
        return self.span(step).samples

    def tokens_in(self, step: int) -> int:
        """Tokens of a step."""
        return self.span(step).tokens

    def samples(self, step: int) -> int:
        """Samples of the first `step` steps, without skipped ones."""
        span = self.span(step)
        return span.samples_before + (step + 1 - span.first_step) * span.samples if step > 0 else 0

    def tokens(self, step: int) -> int:
        """Tokens of the first `step` steps."""
        span = self.span(step)
        return span.tokens_before + (step + 1 - span.first_step) * span.tokens if step > 0 else 0

    def step_of_sample(self, sample: int) -> int:
        """Returns the step, from 1, that has a global sample in a run without skips."""
        starts = [span.samples_before for span in self.spans]
        span = self.spans[bisect_right(starts, sample) - 1]
        return span.first_step + (sample - span.samples_before) // span.samples

    def first_step(self, stage: int) -> int:
        """First step of a stage, from 1."""
        return next(span.first_step for span in self.spans if span.stage == stage)

    def last_step(self, stage: int) -> int:
        """Last step of a stage."""
        return next((span.first_step - 1 for span in self.spans if span.stage > stage), self.steps)

    def stage(self, step: int) -> int:
        """Returns the number of the stage that has a step; steps after the end belong to the last stage."""
        return self.span(step).stage

    def name(self, step: int) -> str:
        """Returns the name of the stage that has a step; empty in a run without stages."""
        return self.names[self.stage(step)]

    def parts(self, first: int, last: int) -> Iterator[tuple[int, int, StepSpan]]:
        """Yields (first step, last step, span) of every span within a range of steps, both included."""
        ends = [*(span.first_step - 1 for span in self.spans[1:]), max(last, self.steps)]
        for span, end in zip(self.spans, ends, strict=True):
            if span.first_step <= last and end >= first:
                yield max(first, span.first_step), min(last, end), span

    def tokens_within(self, first: int, last: int) -> tuple[tuple[int, int, int], ...]:
        """Returns (first step, tokens since `first` before it, tokens per step) of the spans of a range of steps."""
        begun = self.tokens(first - 1)
        return tuple((at, self.tokens(at - 1) - begun, span.tokens) for at, _, span in self.parts(first, last))

    def ledger(self, step: int, *, since: int = 0) -> list[dict[str, Any]]:
        """Returns the record of the steps after `since` up to `step`: one row per span, as plain JSON."""
        rows = []
        for first, last, span in self.parts(since + 1, step):
            row = {"first_step": first, "last_step": last, "samples_per_step": span.samples}
            row |= {"sequence_length": span.sequence_length, "tokens": (last + 1 - first) * span.tokens}
            rows.append({**({"stage": name} if (name := self.names[span.stage]) else {}), **row})
        return rows


@dataclass(frozen=True)
class StageBatches:
    """What the accounts need to know of one stage.

    Attributes:
        name: name of the stage.
        samples: global batch size, the largest of a ramp.
        sequence_length: tokens per sample.
        until: end of the stage; None for the end of the run.
        ramp: the batch ramp; None for a fixed batch.
        ended: whether a resume has ended the stage, and its ramp.
        ramp_key: config key of the ramp.
    """

    name: str
    samples: int
    sequence_length: int
    until: UntilSection | None = None
    ramp: BatchRampSection | None = None
    ended: bool = False
    ramp_key: str = "train_batch_size"

    @property
    def levels(self) -> list[tuple[int, int | None]]:
        """Batch sizes in order, each with the tokens of the stage at which the next one begins; None for the last.

        As in Megatron-LM (`--rampup-batch-size`), all but the last take an equal share of the ramp's tokens, and a
        batch size that fewer tokens than one step are left for is passed over.
        """
        if self.ramp is None:
            return [(self.samples, None)]
        sizes = ramp_sizes(self.ramp)
        share = self.ramp.over_tokens / (len(sizes) - 1)
        ends = [math.ceil((number + 1) * share) for number in range(len(sizes) - 1)]
        return [*zip(sizes[:-1], ends, strict=True), (sizes[-1], None)]


def ramp_sizes(ramp: BatchRampSection) -> range:
    """Returns the batch sizes of a ramp, the first and the last included."""
    by = ramp.by or math.gcd(ramp.start, ramp.to)
    return range(ramp.start, ramp.to + by, by)


def make_accounts(stages: Sequence[StageBatches], *, steps: int | None, tokens: int | None) -> StepAccounts:
    """Makes the accounts of a run.

    Args:
        stages: stages in order, at least one.
        steps: steps of the run; None if its length is given in tokens.
        tokens: tokens of the run, rounded up to whole steps; None if its length is given in steps.

    Raises:
        ConfigError: a stage ends before it begins, after the run or within a step.
    """
    spans: list[StepSpan] = []
    done, samples, seen = 0, 0, 0
    for number, stage in enumerate(stages):
        end = _end(stages, number, steps=steps, tokens=tokens)
        begun, seen_before = done, seen
        for size, upto in stage.levels:
            per_step = size * stage.sequence_length
            count = end.steps - done if end.steps is not None else -(-((end.tokens or 0) - seen) // per_step)
            if upto is not None:
                count = min(count, -(-(seen_before + upto - seen) // per_step))
            if count > 0:
                spans.append(StepSpan(number, done + 1, samples, seen, size, stage.sequence_length))
                done, samples, seen = done + count, samples + count * size, seen + count * per_step
        _check_end(stages, number, end, done=done, begun=begun, seen=seen, last=spans[-1] if spans else None)
    return StepAccounts(tuple(spans), done, tuple(stage.name for stage in stages))


def _end(stages: Sequence[StageBatches], number: int, *, steps: int | None, tokens: int | None) -> UntilSection:
    until, last = stages[number].until, number == len(stages) - 1
    of_run = UntilSection(steps=steps, tokens=tokens)
    field = f"stages.{number}.until"
    if until is None and not last:
        why = f"stage '{stages[number].name}' takes the rest of the run, and another stage follows"
        raise ConfigError(field, "rest", why=why, remedy='give its end, e.g. {"steps": 1000}')
    if until is not None and last and until != of_run:
        why = f"it is the last stage, and the run has {_shown(of_run)}"
        raise ConfigError(field, until.model_dump(exclude_none=True), why=why, remedy="leave it out: the rest")
    return of_run if until is None else until


def _check_end(
    stages: Sequence[StageBatches],
    number: int,
    end: UntilSection,
    *,
    done: int,
    begun: int,
    seen: int,
    last: StepSpan | None,
) -> None:
    name, field = stages[number].name, f"stages.{number}.until"
    value = end.steps if end.steps is not None else end.tokens
    key = f"{field}.steps" if end.steps is not None else f"{field}.tokens"
    if done == begun:
        before = f" ({stages[number - 1].name})" if number else ""
        why = f"stage '{name}' ends before it begins: the stages before it{before} take {begun:,} steps"
        if stages[number].until is None:
            key, value = ("run.steps", end.steps) if end.steps is not None else ("run.tokens", end.tokens)
        raise ConfigError(key, value, why=why, remedy="use a larger number, or remove the stage")
    ramp = stages[number].ramp
    if ramp is not None and not stages[number].ended and last is not None and last.samples != ramp.to:
        key = f"{stages[number].ramp_key}.over_tokens"
        why = f"the stage ends at {last.samples} samples per step, before the ramp has led to {ramp.to}"
        raise ConfigError(key, ramp.over_tokens, why=why, remedy="use fewer tokens, or a longer stage")
    if end.tokens is not None and seen != end.tokens and stages[number].until is not None:
        assert last is not None
        why = f"step {done:,}, of {last.tokens:,} tokens, would belong to two stages"
        near = f"{seen - last.tokens:,} or {seen:,}" if seen - last.tokens > last.tokens_before else f"{seen:,}"
        raise ConfigError(key, value, why=f"the border is within a step: {why}", remedy=f"use {near}")


def _shown(until: UntilSection) -> str:
    return f"{until.steps:,} steps" if until.steps is not None else f"{until.tokens:,} tokens"
