"""What a batch ramp saves in steps, and what it costs in loss, by the laws of the critical batch. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.config.accounts import StepAccounts
from pipeline.plan.laws.laws import chinchilla_loss, critical_batches

_PARTS = 64
"""Parts into which a span of equal steps is divided: the critical batch grows meanwhile."""


@dataclass(frozen=True)
class RampEffect:
    """Effect of a ramp against a constant batch with as many tokens, by one law.

    Attributes:
        law: name of the law, its source, and whether it is extrapolated.
        batch: tokens per step of the constant batch.
        fewer_steps: share of the constant batch's steps that the ramp saves; negative where it needs more.
        loss_change: loss of the ramp minus that of the constant batch, nats per token by the Chinchilla law.
    """

    law: str
    batch: int
    fewer_steps: float
    loss_change: float


def ramp_effects(accounts: StepAccounts, stage: int, parameters: int) -> Iterator[RampEffect]:
    """Yields the effects of a stage's ramp against its smallest and its largest batch throughout the stage, by law.

    Args:
        accounts: the run's steps.
        stage: number of the stage.
        parameters: non-embedding parameters (N).
    """
    begin, end = accounts.first_step(stage), accounts.last_step(stage)
    steps = [(last + 1 - first, span.tokens) for first, last, span in accounts.parts(begin, end)]
    before, after = accounts.tokens(begin - 1), accounts.tokens(end)
    for law, (_, source, in_range) in critical_batches(parameters, after).items():
        own = _worth(steps, before, parameters, law)
        name = f"{law} ({source}{'' if in_range else '; extrapolated'})"
        for batch in (min(tokens for _, tokens in steps), max(tokens for _, tokens in steps)):
            count = -(-(after - before) // batch)
            constant = _worth([(count, batch)], before, parameters, law)
            change = chinchilla_loss(parameters, own) - chinchilla_loss(parameters, constant)
            yield RampEffect(name, batch, 1 - (end + 1 - begin) / count, change)


def ramp_texts(accounts: StepAccounts, stage: int, parameters: int) -> Iterator[str]:
    """Yields a line for every effect of a stage's ramp."""
    for each in ramp_effects(accounts, stage, parameters):
        more = "fewer" if each.fewer_steps >= 0 else "more"
        yield (
            f"{abs(each.fewer_steps):.0%} {more} steps than {each.batch:,} tokens per step throughout, and a loss that"
            f" differs by {each.loss_change:+.4f} nats, by {each.law}"
        )


def _worth(steps: Sequence[tuple[int, int]], before: int, parameters: int, law: str) -> float:
    """Returns the tokens in small batches that teach as much as some steps do.

    Args:
        steps: numbers of steps with their tokens per step, in order.
        before: tokens before the steps, which count in full.
        parameters: non-embedding parameters.
        law: name of the law of the critical batch.
    """
    done = worth = float(before)
    for count, batch in steps:
        part = count * batch / _PARTS
        for _ in range(_PARTS):
            worth += part / (1 + batch / critical_batches(parameters, done + part / 2)[law][0])
            done += part
    return worth
