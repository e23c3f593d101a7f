"""Compares a run's hyperparameters with the published laws, and warns where all laws disagree with them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.config.batch import BatchSizes
from pipeline.config.schedule import Schedule
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.plan.laws.laws import CHINCHILLA_RATIO, Quantity, Suggestion, chinchilla_loss, suggestions

FAR = {Quantity.BATCH: 4.0, Quantity.LEARNING_RATE: 3.0, Quantity.WEIGHT_DECAY: 5.0, Quantity.WARMUP: 10.0}
"""Ratio from which a value is far from a law's. Our choice: the laws differ by up to a factor of 2 within their ranges,
and the optimum is broad (Step Law, figure 1)."""

FEWEST_TOKENS = 5.0
"""Tokens per parameter below which a smaller model would clearly be better at the same compute."""


@dataclass(frozen=True)
class Training:
    """Hyperparameters of a run for which there are laws.

    Attributes:
        parameters: parameters (N) without input embedding and output head.
        tokens: training tokens (D).
        sequence_length: tokens per sample.
        batch: tokens per step.
        learning_rate: peak learning rate.
        weight_decay: weight decay of matrices.
        warmup: tokens of warm-up.
        adamw: whether learning rate and weight decay have AdamW's scale, for which the laws hold.
        ramps: lines of text with the steps that each batch ramp saves, and its effect on the loss.
    """

    parameters: int
    tokens: int
    sequence_length: int
    batch: int
    learning_rate: float
    weight_decay: float
    warmup: int
    adamw: bool = True
    ramps: tuple[str, ...] = ()

    def suggestions(self) -> tuple[Suggestion, ...]:
        """The laws' suggestions for the run; weight decay for its own batch and learning rate."""
        return suggestions(
            self.parameters,
            self.tokens,
            sequence_length=self.sequence_length,
            batch=self.batch,
            learning_rate=self.learning_rate,
        )

    def value(self, quantity: Quantity) -> float:
        """The run's own value of a quantity."""
        return {
            Quantity.BATCH: float(self.batch),
            Quantity.LEARNING_RATE: self.learning_rate,
            Quantity.WEIGHT_DECAY: self.weight_decay,
            Quantity.WARMUP: float(self.warmup),
            Quantity.TOKENS: float(self.tokens),
        }[quantity]


def training_of(
    batch: BatchSizes, schedule: Schedule, optimizer: OptimizerSection, *, tokens: int, parameters_non_embedding: int
) -> Training:
    """Collects the hyperparameters of a resolved run.

    Args:
        batch: batch sizes of the run.
        schedule: learning rates of the run.
        optimizer: optimizer section of its config.
        tokens: training tokens of the whole run.
        parameters_non_embedding: parameters of the model without input embedding and output head.
    """
    return Training(
        parameters=parameters_non_embedding,
        tokens=tokens,
        sequence_length=batch.sequence_length,
        batch=batch.tokens,
        learning_rate=schedule.peak,
        weight_decay=optimizer.params.weight_decay,
        warmup=schedule.warmup * batch.tokens,
        adamw=optimizer.has_adamw_rates,
    )


def warnings(training: Training) -> Iterator[str]:
    """Yields a line for each hyperparameter that is far from all suggestions, with the laws' values."""
    yield from _tokens(training)
    if not training.adamw:
        return
    found = training.suggestions()
    for quantity, factor in FAR.items():
        laws = [each for each in found if each.quantity is quantity]
        yield from _far(quantity, training.value(quantity), laws, factor)


def _far(quantity: Quantity, given: float, laws: Sequence[Suggestion], factor: float) -> Iterator[str]:
    if any(law.value / factor <= given <= law.value * factor for law in laws):
        return
    if min(law.value for law in laws) < given < max(law.value for law in laws):
        return  # the value lies between two laws that disagree
    if quantity is Quantity.WARMUP and not laws[0].in_range:
        return  # at less than two tokens per parameter, N tokens are more than half of the run
    texts = ", ".join(f"{shown(law.value)} by {law.law}{'' if law.in_range else ' (extrapolated)'}" for law in laws)
    yield f"{quantity}: {shown(given)}, over {factor:g} times away from {texts}"


def _tokens(training: Training) -> Iterator[str]:
    ratio = training.tokens / training.parameters
    if ratio >= FEWEST_TOKENS:
        return
    n, d = float(training.parameters), float(training.tokens)
    compute = n * d
    best = (compute / CHINCHILLA_RATIO) ** 0.5
    gain = chinchilla_loss(n, d) - chinchilla_loss(best, compute / best)
    in_range = next(law.in_range for law in training.suggestions() if law.quantity is Quantity.TOKENS)
    if gain > 0:
        less = f"{gain:.2f} nats less" if in_range else "a lower loss (extrapolated)"
        yield (
            f"{Quantity.TOKENS}: {training.tokens:,}, {ratio:.1f} per parameter: {best:,.0f} parameters on"
            f" {compute / best:,.0f} tokens cost as much compute, and by the Chinchilla law have {less}"
        )


def shown(value: float) -> str:
    """Formats a value of any size."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
