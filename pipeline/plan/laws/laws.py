"""Published laws for batch size, learning rate, weight decay, warm-up and tokens of a training run.

Each law is a formula of N, the non-embedding parameters (neither input embedding nor output head), and D, the training
tokens, with its source and the range of models to which it was fitted. Outside of the range its value is an
extrapolation. No torch: plain arithmetic.

Step Law: Li et al. 2025, arXiv:2503.04715. lr = 1.79 N^-0.713 D^0.307, B = 0.58 D^0.571 tokens.
Power Lines: Bergsma et al. 2025, arXiv:2505.13738. B / (lr wd D) = 1.084 (D/N)^-0.527, B = 0.0306 D^0.383 sequences.
OLMo's ladder: OLMo-core's model ladder, after Porian et al. 2024, arXiv:2406.19146. B = 2,048 x 160 (N / 108M)^(2/3)
tokens, lr = 0.0047 (N / 108M)^(-1/3) / 2, weight decay 0.1, warm-up of N tokens.
Critical batch: a token in a batch of B tokens teaches as much as 1 / (1 + B / B_crit) tokens in small batches
(McCandlish et al. 2018, arXiv:1812.06162, section 2.3). B_crit = 2.1e8 L^(-1/0.21) tokens at a loss of L nats (Kaplan
et al. 2020, arXiv:2001.08361, section 5.1), or by Power Lines 0.0471 D^0.462 sequences of 2,048 tokens, D in tokens.
Power Lines' numbers for the critical batch are unverified: texts that cite it have an exponent of 0.46 to 0.47, and
neither the factor nor its unit could be compared with the paper.
Chinchilla: Hoffmann et al. 2022, arXiv:2203.15556, with the numbers of Besiroglu et al. 2024, arXiv:2404.10102. D =
20 N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

CHINCHILLA_RATIO = 20
"""Tokens per parameter of a compute-optimal model (Hoffmann et al. 2022, table 3)."""


class Quantity(StrEnum):
    """Quantities that laws suggest, with their units."""

    BATCH = "batch size, tokens"
    LEARNING_RATE = "peak learning rate"
    WEIGHT_DECAY = "weight decay"
    WARMUP = "warm-up, tokens"
    TOKENS = "training tokens"


@dataclass(frozen=True)
class Range:
    """The models that a law was fitted on.

    Attributes:
        parameters: smallest and largest N.
        tokens_per_parameter: smallest and largest D / N.
        text: the range in words, with the fixed settings.
    """

    parameters: tuple[float, float]
    tokens_per_parameter: tuple[float, float]
    text: str

    def holds(self, parameters: float, tokens: float) -> bool:
        """Whether a run is within the range."""
        (smallest, largest), (fewest, most) = self.parameters, self.tokens_per_parameter
        return smallest <= parameters <= largest and fewest <= tokens / parameters <= most


@dataclass(frozen=True)
class Suggestion:
    """A value that a law suggests for a run.

    Attributes:
        quantity: suggested quantity, with its unit.
        law: name of the law.
        value: suggested value, in the quantity's unit.
        formula: formula of the law, with its numbers.
        source: publication of the law.
        fitted_on: range of models that the law was fitted on, in words.
        in_range: whether the run is within the range; else the value is an extrapolation.
    """

    quantity: Quantity
    law: str
    value: float
    formula: str
    source: str
    fitted_on: str
    in_range: bool


@dataclass(frozen=True)
class Gain:
    """Effect of more tokens on the loss, by the Chinchilla law.

    Attributes:
        tokens: training tokens (D).
        per_parameter: D / N.
        loss_change: change of the loss against 20 tokens per parameter, in nats per token.
        compute: training FLOPs as a multiple of the FLOPs at 20 tokens per parameter.
    """

    tokens: float
    per_parameter: float
    loss_change: float
    compute: float


@dataclass(frozen=True)
class _LawSource:
    law: str
    source: str
    range: Range


_STEP = _LawSource(
    "Step Law",
    "Li et al. 2025, arXiv:2503.04715",
    Range((60e6, 1.1e9), (2, 1000), "60M to 1B parameters, 2B to 100B tokens; AdamW, cosine to 1e-5"),
)
_POWER = _LawSource(
    "Power Lines",
    "Bergsma et al. 2025, arXiv:2505.13738",
    Range((111e6, 3.3e9), (20, 1000), "111M to 3.3B parameters, 20 tokens per parameter and more; AdamW, muP"),
)
_OLMO = _LawSource(
    "OLMo's ladder",
    "OLMo-core's model ladder, after Porian et al. 2024, arXiv:2406.19146",
    Range((5e6, 1.3e9), (10, 40), "5M to 1B parameters at 20 tokens per parameter; AdamW, beta2 0.95 to 0.99"),
)
_CHINCHILLA = _LawSource(
    "Chinchilla",
    "Hoffmann et al. 2022, arXiv:2203.15556",
    Range((44e6, 16e9), (0, 1e9), "44M to 16B parameters on web text"),
)
_POWER_LINES_SEQUENCE = 2048
"""Tokens per sequence in which Power Lines counts batches."""
_LOSS = (1.8172, 482.01, 0.3478, 2085.43, 0.3658)
"""E, A, alpha, B, beta of L = E + A / N^alpha + B / D^beta, nats per token (Besiroglu et al., arXiv:2404.10102)."""


def step_law_learning_rate(parameters: float, tokens: float) -> float:
    """Peak learning rate by Step Law (arXiv:2503.04715, equation 1) for N non-embedding parameters and D tokens."""
    return float(1.79 * parameters**-0.713 * tokens**0.307)


def step_law_batch(tokens: float) -> float:
    """Batch size in tokens by Step Law (arXiv:2503.04715, equation 1) for D tokens."""
    return float(0.58 * tokens**0.571)


def power_lines_weight_decay(parameters: float, tokens: float, *, batch: float, learning_rate: float) -> float:
    """Weight decay by Power Lines, from the timescale B / (lr wd D) = 1.084 (D/N)^-0.527 (arXiv:2505.13738).

    Args:
        parameters: non-embedding parameters (N).
        tokens: training tokens (D).
        batch: tokens per step (B).
        learning_rate: peak learning rate.
    """
    timescale = 1.084 * (tokens / parameters) ** -0.527
    return float(batch / (learning_rate * timescale * tokens))


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """Loss in nats per token by the Chinchilla law on its own data: differences mean more than absolute values."""
    e, a, alpha, b, beta = _LOSS
    return float(e + a / parameters**alpha + b / tokens**beta)


def critical_batches(parameters: float, tokens: float) -> dict[str, tuple[float, str, bool]]:
    """Returns the critical batch after D tokens by each law: its tokens, source, and whether N and D were fitted.

    McCandlish's law needs a loss, which is that of the Chinchilla law here; it was fitted up to 1.5B parameters.
    """
    loss = chinchilla_loss(parameters, tokens)
    kaplan = (2.1e8 * loss ** (-1 / 0.21), "arXiv:1812.06162, 2001.08361", parameters <= 1.5e9)
    power = 0.0471 * tokens**0.462 * _POWER_LINES_SEQUENCE
    return {
        "McCandlish": kaplan,
        _POWER.law: (power, "arXiv:2505.13738; factor unverified", _POWER.range.holds(parameters, tokens)),
    }


def suggestions(
    parameters_non_embedding: int,
    tokens: int,
    *,
    sequence_length: int,
    batch: float | None = None,
    learning_rate: float | None = None,
) -> tuple[Suggestion, ...]:
    """The suggestions of all laws for a run.

    Args:
        parameters_non_embedding: N, without input embedding and output head; for a mixture of experts, the active
            parameters.
        tokens: training tokens (D).
        sequence_length: tokens per sample; no batch is smaller.
        batch: tokens per step, for the weight decay; None for Step Law's.
        learning_rate: peak learning rate, for the weight decay; None for Step Law's.

    Raises:
        ValueError: a number is not positive.
    """
    if min(parameters_non_embedding, tokens, sequence_length) <= 0:
        raise ValueError("parameters, tokens and sequence length are positive")
    n, d = float(parameters_non_embedding), float(tokens)
    batch = batch or max(step_law_batch(d), sequence_length)
    learning_rate = learning_rate or step_law_learning_rate(n, d)
    return tuple(_all(n, d, sequence_length, batch, learning_rate))


def _all(n: float, d: float, sequence_length: int, batch: float, lr: float) -> Iterator[Suggestion]:
    def made(quantity: Quantity, source: _LawSource, value: float, formula: str) -> Suggestion:
        known = source.range
        return Suggestion(quantity, source.law, value, formula, source.source, known.text, known.holds(n, d))

    def at_least_one(value: float) -> float:
        return max(value, float(sequence_length))

    yield made(Quantity.BATCH, _STEP, at_least_one(step_law_batch(d)), "0.58 D^0.571")
    sequences = 0.0306 * d**0.383
    yield made(
        Quantity.BATCH, _POWER, at_least_one(sequences * _POWER_LINES_SEQUENCE), "0.0306 D^0.383 sequences of 2,048"
    )
    olmo_batch = 2048 * 160 * (n / 108e6) ** (2 / 3)
    yield made(Quantity.BATCH, _OLMO, at_least_one(olmo_batch), "2,048 x 160 (N / 108M)^(2/3)")
    yield made(Quantity.LEARNING_RATE, _STEP, step_law_learning_rate(n, d), "1.79 N^-0.713 D^0.307")
    olmo_rate = 0.0047 * (n / 108e6) ** (-1 / 3) / 2
    yield made(Quantity.LEARNING_RATE, _OLMO, olmo_rate, "0.0047 (N / 108M)^(-1/3) / 2, with WSD")
    decay = power_lines_weight_decay(n, d, batch=batch, learning_rate=lr)
    at = f"at B = {batch:,.0f} and lr = {lr:.2g}"
    yield made(Quantity.WEIGHT_DECAY, _POWER, decay, f"B / (lr D 1.084 (D/N)^-0.527), {at}")
    yield made(Quantity.WEIGHT_DECAY, _OLMO, 0.1, "0.1, none on embeddings")
    yield made(Quantity.WARMUP, _OLMO, n, "N tokens")
    yield made(Quantity.TOKENS, _CHINCHILLA, CHINCHILLA_RATIO * n, f"{CHINCHILLA_RATIO} N, compute-optimal")


def more_tokens(parameters: int, *, ratios: tuple[int, ...] = (5, 20, 40, 100, 200)) -> tuple[Gain, ...]:
    """Compute and loss of several token budgets against 20 tokens per parameter, by the Chinchilla law.

    A model that is served for long is worth training past 20 tokens per parameter: the loss falls, and inference costs
    the same. Source of the numbers: Besiroglu et al. 2024, arXiv:2404.10102.

    Args:
        parameters: non-embedding parameters (N).
        ratios: tokens per parameter.
    """
    n = float(parameters)
    optimal = chinchilla_loss(n, CHINCHILLA_RATIO * n)
    return tuple(
        Gain(ratio * n, ratio, chinchilla_loss(n, ratio * n) - optimal, ratio / CHINCHILLA_RATIO) for ratio in ratios
    )
