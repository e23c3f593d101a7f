"""A loss that the user wrote, named by `loss.function`, as a training objective.

The function gets logits [B, T, V] in fp32 and labels int64 [B, T], which are -100 where there is no target, and returns
a scalar: the sum of the loss over the targets. The engine divides it by the number of targets of the whole step.
Because it is a sum, it can be computed in chunks of positions and added up over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foundation.errors import ConfigError
from foundation.user_function import UserFunction
from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.engines.objective import Loss
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard

FIELD = "loss.function"
_REMEDY = (
    "write def loss(logits, labels): return a scalar tensor, the sum (not the mean) over the positions whose label is"
    " not -100, made of torch functions of the logits"
)


class UserLoss:
    """The user's function as an `engines.objective.Objective`.

    Attributes:
        eager: its code is not compiled: it may be any Python.
    """

    parts: tuple[str, ...] = ()
    eager = True

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._function = function

    def extra_targets(self, _batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns none."""
        return ()

    def __call__(
        self, logits: Tensor, labels: Tensor, *_extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """Calls the function; `vocabulary` is whole (`config.rules.own_loss`)."""
        assert vocabulary.group is None
        return Loss(self._function(logits.float(), labels))

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *_extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Loss, Tensor]:
        """Implements `Objective.with_gradient` by autograd; takes a copy of the logits in fp32."""
        assert vocabulary.group is None
        with torch.enable_grad():
            leaf = logits.detach().float().requires_grad_()
            total = self._function(leaf, labels)
            (gradient,) = torch.autograd.grad(total, leaf)
        return Loss(total.detach()), gradient


def check_user_loss(function: UserFunction) -> None:
    """Tries a loss on six positions of a vocabulary of 11 ids, so that a wrong function is refused before the run.

    Raises:
        ConfigError: it fails, returns no scalar with a gradient, or is no sum over the positions with a target.
    """
    loss = UserLoss(function.call)
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[3, 1, 4], [1, 5, 9]])
    try:
        whole, gradient = loss.with_gradient(logits, labels)
        parts = [loss(logits[:, at : at + 1], labels[:, at : at + 1]).total for at in range(3)]
        masked = labels.masked_fill(torch.tensor([[False, True, True]]), IGNORE)
        first = loss(logits, masked).total
    except Exception as error:  # the user's code runs here
        why = f"on logits [2, 3, 11] and labels [2, 3] it failed with {type(error).__name__}: {error}"
        raise ConfigError(FIELD, function.name, why=why, remedy=_REMEDY) from error
    if whole.total.shape or not gradient.isfinite().all():
        why = f"it returned the shape {list(whole.total.shape)}, or its gradient is not finite"
        raise ConfigError(FIELD, function.name, why=why, remedy=_REMEDY)
    if not torch.allclose(whole.total, torch.stack(parts).sum(), rtol=1e-4, atol=1e-5):
        why = f"of six positions it is {float(whole.total):.5g}, and {float(sum(parts)):.5g} of them one by one"
        raise ConfigError(FIELD, function.name, why=f"{why}: it is no sum", remedy=_REMEDY)
    if not torch.allclose(first, parts[0], rtol=1e-4, atol=1e-5):
        raise ConfigError(FIELD, function.name, why="positions whose label is -100 change it", remedy=_REMEDY)
