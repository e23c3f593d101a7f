"""Compares the predictions of a compressed model with the original's, position by position. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_ROWS = 256
"""Positions whose distributions are in memory at a time, in float64."""

LogProbabilities = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ScoreComparison:
    """Figures of two models on the same positions.

    Attributes:
        mean_kl: mean of KL(original || other) over positions, in nats.
        max_kl: largest KL over positions, in nats.
        top1_agreement: share of positions with the same likeliest token, 0 to 1.
        perplexity: perplexity of the other model on the windows.
        original_perplexity: perplexity of the original on the windows.
        positions: number of positions compared.
    """

    mean_kl: float
    max_kl: float
    top1_agreement: float
    perplexity: float
    original_perplexity: float
    positions: int


def compare(original: LogProbabilities, other: LogProbabilities, windows: npt.NDArray[np.int64]) -> ScoreComparison:
    """Compares log-probabilities [n, T - 1, V] of two models over windows [n, T].

    KL divergence in float64: the sum over the vocabulary of p (log p - log q), where p is the original's. Both are
    normalized again, because a consumer may round its output.
    """
    size = original.shape[-1]
    targets = windows[:, 1:].reshape(-1)
    first, second = original.reshape(-1, size), other.reshape(-1, size)
    kls, same, own, others = [], 0, 0.0, 0.0
    for begin in range(0, len(targets), _ROWS):
        rows = slice(begin, begin + _ROWS)
        log_p, log_q = (normalized(each[rows]) for each in (first, second))
        kls.append(kl_divergence(log_p, log_q))
        same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        picked = (np.arange(len(log_p)), targets[rows])
        own -= float(log_p[picked].sum())
        others -= float(log_q[picked].sum())
    all_kl, count = np.concatenate(kls), len(targets)
    return ScoreComparison(
        mean_kl=float(all_kl.mean()),
        max_kl=float(all_kl.max()),
        top1_agreement=same / count,
        perplexity=float(np.exp(others / count)),
        original_perplexity=float(np.exp(own / count)),
        positions=count,
    )


def normalized(log_probabilities: LogProbabilities) -> npt.NDArray[np.float64]:
    """float64 [rows, V] whose exponentials sum to 1 in every row."""
    wide = log_probabilities.astype(np.float64)
    highest = wide.max(-1, keepdims=True)
    total: npt.NDArray[np.float64] = wide - highest - np.log(np.exp(wide - highest).sum(-1, keepdims=True))
    return total


def kl_divergence(log_p: npt.NDArray[np.float64], log_q: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """KL(p || q) of each row, in nats; rounding may make a zero -1e-16, which is set to 0."""
    p = np.exp(log_p)
    # where p is 0 the term is 0, even if q is 0
    terms = np.where(p > 0, p * (log_p - log_q), 0.0)
    total: npt.NDArray[np.float64] = np.maximum(terms.sum(-1), 0.0)
    return total
