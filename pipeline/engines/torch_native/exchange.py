"""Sums a step's gradients over replicas of the model that come and go, between backward passes and update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.engines.base import GradientExchange


class ExchangedGradients:
    """Mixin with the `exchange_gradients_by` of an engine; see `engines.base.ExchangesGradients`."""

    deferred: bool
    _exchange: GradientExchange | None = None

    def exchange_gradients_by(self, exchange: GradientExchange) -> None:
        """Implements `ExchangesGradients.exchange_gradients_by`."""
        self._exchange, self.deferred = exchange, False

    def _exchanged(
        self,
        step: StepBatch,
        sums: Tensor,
        *,
        gradients: Callable[[], Sequence[Tensor]],
        train: Callable[[Sequence[MicroBatch]], Tensor],
    ) -> Tensor:
        """Sums gradients, in place, and loss sums over the replicas; runs micro-batches left by a dead replica.

        Args:
            step: the step's batch, whose micro-batches have been run.
            sums: sums of the loss and its parts over these micro-batches, [1 + parts].
            gradients: function that returns this rank's gradients in the form for `GradientExchange`.
            train: function that runs micro-batches, accumulates their gradients and returns their sums.

        Returns:
            The sums of all samples of the step.
        """
        if self._exchange is None:
            return sums
        while more := self._exchange(step, gradients(), sums):
            sums = sums + train(more)
        return sums
