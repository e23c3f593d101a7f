"""Acceptance rate of multi-token prediction: how many drafts of the first module the model itself would have made.

The module drafts, at position i, the token at i + 2, from the model's hidden state at i and the token at i + 1. Greedy
speculative decoding accepts the draft if the model's likeliest token at position i + 1 is the same. Over held-out text,
whose tokens stand for the generated ones, the fraction of equal tokens is the acceptance rate of one draft per step.

Shapes: B samples, T positions of this rank, V' columns of this rank's shard of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.engines.objective import Loss
from pipeline.engines.parallel.collectives import all_gather
from pipeline.engines.parallel.multi_token import MultiTokenObjective, TokensAhead
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard


class GreedyTokens:
    """An objective that keeps the likeliest token of every position and computes no loss."""

    parts: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._tokens: list[Tensor] = []
        self._labels: list[Tensor] = []

    def extra_targets(self, _batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns none."""
        return ()

    def __call__(
        self, logits: Tensor, labels: Tensor, *_extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """Keeps the tokens of a chunk, whose logits are [B, T', V'] or [1, rows, V']."""
        highest, tokens = logits.float().max(dim=-1)
        tokens = tokens + vocabulary.first
        if vocabulary.group is not None:
            every = all_gather(highest[None], vocabulary.group, dim=0)
            tokens = all_gather(tokens[None], vocabulary.group, dim=0).gather(0, every.argmax(0, keepdim=True))[0]
        self._tokens.append(tokens.flatten())
        self._labels.append(labels.flatten())
        return Loss(highest.new_zeros(()))

    def with_gradient(self, *_args: Any, **_kwargs: Any) -> tuple[Loss, Tensor]:
        """Fails: there is no gradient."""
        raise AssertionError("an evaluation has no gradient")

    def take(self) -> tuple[Tensor, Tensor]:
        """Returns tokens and labels of a micro-batch, int64 [B x T], and forgets them."""
        found = torch.cat(self._tokens), torch.cat(self._labels)
        self._tokens, self._labels = [], []
        return found


class Acceptance(GreedyTokens, MultiTokenObjective):
    """An objective for forward passes that counts the drafts of the first module that the model accepts."""

    further: GreedyTokens

    def __init__(self) -> None:
        super().__init__()
        self.further = GreedyTokens()
        self._counts: Tensor | None = None

    def combined(
        self, sums: tuple[Tensor, ...], further: Sequence[Tensor], ahead: TokensAhead, batch: MicroBatch
    ) -> tuple[Tensor, ...]:
        """Counts a micro-batch; returns the sums of the next token unchanged, which are 0."""
        tokens, _ = self.take()
        drafts, labels = (each.view(len(further), -1)[0] for each in self.further.take())
        accepted, _ = ahead.shifted(tokens.view(batch.labels.shape), batch, by=1)
        drafted = labels != IGNORE
        equal = drafted & (drafts == accepted.flatten())
        counts = torch.stack((equal.sum(), drafted.sum())).double()
        self._counts = counts if self._counts is None else self._counts + counts
        return sums

    def rate(self, device: torch.device) -> float | None:
        """Returns the rate over all ranks; None without a draft. Collective. Ranks of a tp group count alike."""
        counts = torch.zeros(2, dtype=torch.float64, device=device) if self._counts is None else self._counts
        if dist.is_initialized():
            dist.all_reduce(counts)
        accepted, drafted = counts.tolist()
        return accepted / drafted if drafted else None
