"""What is minimised: a sum over target tokens, never a mean.

Sums add up across micro-batches and ranks whatever their sizes; the engine divides once, by the targets of the whole
step. A mean of means would weight tokens by how they happened to be batched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from pipeline.data.loader import IGNORE, MicroBatch


@dataclass(frozen=True)
class Loss:
    """Sums over the target tokens of a micro-batch, in nats.

    Attributes:
        total: scalar, fp32; what is differentiated.
        parts: named scalars to report, detached; they need not add up to `total`.
    """

    total: Tensor
    parts: dict[str, Tensor]


class Objective(Protocol):
    """A loss as a function of the model's logits."""

    def __call__(self, logits: Tensor, batch: MicroBatch) -> Loss:
        """Scores logits [B, T, V] against a batch."""
        ...


class CrossEntropy:
    """Next-token cross-entropy, computed in fp32."""

    def __call__(self, logits: Tensor, batch: MicroBatch) -> Loss:
        """Sum over targets of -log p(target); logits [B, T, V]."""
        return Loss(cross_entropy_sum(logits, batch.labels), {})


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum in nats of -log softmax(logits)[label] over labels that count.

    Args:
        logits: [B, T, V], any float dtype; the softmax is taken in fp32.
        labels: int64 [B, T], IGNORE where there is no target.
    """
    flat = logits.float().flatten(0, -2)
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE, reduction="sum")
