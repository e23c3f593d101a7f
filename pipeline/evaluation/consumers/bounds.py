"""Bounds on the distance of a compressed model from its original, by scheme.

The bounds tell a broken file from a lossy one; they do not promise quality. Each is ten to forty times the largest
value measured on a trained model with a sound method (docs/reference/consumers.md): small, little-trained models lose
more than large ones, and a broken file (a wrong permutation, a missing scale, a wrong tokenizer) is off by whole nats.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from math import exp, inf, isfinite, log

from pipeline.evaluation.consumers.compare import ScoreComparison


@dataclass(frozen=True)
class Bound:
    """A scheme's largest mean KL(original || compressed) in nats, and largest ratio of the perplexities."""

    mean_kl: float
    perplexity_ratio: float
    scheme: str = field(default="", compare=False)


_EIGHT_BITS, _FOUR_BITS = Bound(0.02, 1.02), Bound(0.2, 1.2)
BOUNDS = {
    "float32": Bound(1e-3, 1.002),  # a consumer may compute in bf16
    "bfloat16": Bound(2e-3, 1.005),
    "float16": Bound(2e-3, 1.005),
    "F32": Bound(1e-3, 1.002),
    "BF16": Bound(2e-3, 1.005),
    "F16": Bound(2e-3, 1.005),
    **dict.fromkeys(("W8A16", "W8A8", "FP8", "Q8_0"), _EIGHT_BITS),
    **dict.fromkeys(("Q6_K", "Q5_K_M"), Bound(0.05, 1.05)),
    **dict.fromkeys(("W4A16", "Q4_0", "Q4_K_M", "MXFP4", "mixed"), _FOUR_BITS),
    "Q3_K_M": Bound(0.3, 1.35),
    "Q2_K": Bound(1.0, 2.0),
}
"""Scheme -> bound."""

_UNKNOWN = _FOUR_BITS
_LARGEST_EXPONENT = log(sys.float_info.max)


def bound_of(scheme: str) -> Bound:
    """The bound of a scheme; schemes that are not listed have the bound of 4-bit schemes."""
    return replace(BOUNDS.get(scheme, _UNKNOWN), scheme=scheme)


def bound_within(scheme: str, max_mean_kl: float | None) -> Bound:
    """The bound of a scheme, or one from a config.

    Args:
        scheme: scheme of the compressed model.
        max_mean_kl: largest mean KL divergence, nats; None for the scheme's bound. The perplexity may then rise by what
            that divergence explains, beside what the scheme's bound allows.
    """
    known = bound_of(scheme)
    if max_mean_kl is None:
        return known
    explained = exp(max_mean_kl) if max_mean_kl < _LARGEST_EXPONENT else inf
    return Bound(max_mean_kl, explained + known.perplexity_ratio - 1, scheme)


def broken_bounds(found: ScoreComparison, bound: Bound) -> list[str]:
    """Figures outside the bound, as sentences; empty when there are none."""
    ratio = found.perplexity / found.original_perplexity
    broken = []
    if not isfinite(found.mean_kl) or found.mean_kl > bound.mean_kl:
        broken.append(f"mean KL to the original is {found.mean_kl:.3g} nats, and {bound.mean_kl:g} is allowed")
    if not isfinite(ratio) or ratio > bound.perplexity_ratio:
        both = f"{found.original_perplexity:.4g} to {found.perplexity:.4g}"
        allowed = f"{bound.perplexity_ratio:g} times the original's is allowed"
        broken.append(f"perplexity went from {both} ({ratio:.3g} times), and {allowed}")
    return broken
