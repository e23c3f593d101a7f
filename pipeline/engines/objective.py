"""Training objectives (loss functions): a sum over target tokens, never a mean.

Sums add up across micro-batches, ranks and sequence shards whatever their sizes; the engine divides once, by the number
of targets of the whole step. A mean of means would weight tokens by how they happened to be batched.

Because an objective is a sum over positions, it can be computed in chunks of positions (chunked loss), so that the
logits of all positions never exist at the same time. For this, it also returns the logits' gradient with the loss.

Shapes: B samples, T positions, V ids of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard, cross_entropy, cross_entropy_gradient


@dataclass(frozen=True)
class Loss:
    """Sums over the target tokens that were scored, in nats.

    Attributes:
        total: scalar to differentiate, fp32.
        parts: scalars to report, detached, in the order of `Objective.parts`; they need not add up to `total`.
    """

    total: Tensor
    parts: tuple[Tensor, ...] = ()


class Objective(Protocol):
    """A loss as a function of the model's logits.

    Attributes:
        parts: names of the parts reported besides the total.
    """

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts."""
        ...

    def extra_targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns targets per position besides the labels, each [B, T, ...], e.g. a teacher's logits."""
        ...

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """Computes the loss of some positions.

        Args:
            logits: [B, T', V'], logits of a chunk of T' positions; V' columns, those of `vocabulary`.
            labels: int64 [B, T'], IGNORE where there is no target.
            extra_targets: targets that the method `extra_targets` returned, at the same positions.
            vocabulary: this rank's shard of the vocabulary.
        """
        ...

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Loss, Tensor]:
        """Computes the loss, and the gradient of its total with respect to the logits, fp32 [B, T', V']."""
        ...


class CrossEntropy:
    """Next-token cross-entropy, computed in fp32, with the z-loss.

    Args:
        z_loss: weight of the sum of (log Z)^2, which keeps logits from drifting; 0 for none. Source: Chowdhery et al.
            2022, PaLM (arXiv:2204.02311), section 5.
    """

    def __init__(self, *, z_loss: float = 0.0) -> None:
        self._z_loss = z_loss
        self.parts = ("cross_entropy", "z_loss") if z_loss else ()

    def extra_targets(self, _batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns none: the labels are the only targets."""
        return ()

    def __call__(
        self, logits: Tensor, labels: Tensor, *_extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """Sums -log p(target) + z_loss * (log Z)^2 over targets."""
        return self._sums(*cross_entropy(logits, labels, vocabulary))

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *_extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Loss, Tensor]:
        """Implements `Objective.with_gradient`."""
        nats, squares, gradient = cross_entropy_gradient(logits, labels, vocabulary, squares_weight=self._z_loss)
        return self._sums(nats, squares), gradient

    def _sums(self, nats: Tensor, squares: Tensor) -> Loss:
        if not self._z_loss:
            return Loss(nats)
        z = self._z_loss * squares
        return Loss(nats + z, (nats.detach(), z.detach()))
