"""Samples the next tokens from a student's logits, within its forward pass and with a sharded vocabulary.

A token is drawn by the Gumbel-max method: argmax of logits / temperature + g, with independent Gumbel numbers g, has
the distribution softmax(logits / temperature). Each rank finds the maximum of its columns, and the maximum over ranks
is the token: logits are never gathered. Temperature 0 leaves the noise out.

The noise is a function of (run.seed, step, sample of the step, position, id), by the counter of
`models.construction.counter`: it is the same in every layout, on every rank, and after a restart. Source: Yellott 1977,
"The relationship between Luce's choice axiom, Thurstone's theory of comparative judgment, and the double exponential
distribution"; Gumbel 1954.

Shapes: n samples, T positions of a forward pass, V' columns of this rank's shard of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.data.micro_batch import MicroBatch
from pipeline.data.permutation import derive_key
from pipeline.engines.objective import Loss
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from pipeline.models.construction.counter import philox

_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Place:
    """The logits of a forward pass from which tokens are drawn, and the noise added to them.

    Attributes:
        width: number of positions of the pass, T.
        column: position whose logits are used, in every sample.
        samples: int64 [n], the samples' indices in the step.
        step: number of the run's step.
        number: index of the new token in its sample, from 0.
    """

    width: int
    column: int
    samples: Tensor
    step: int
    number: int


def noise_key(seed: int) -> int:
    """Returns the 64-bit key of a run's noise."""
    return derive_key(seed, "on-policy sampling")


def gumbel(place: Place, *, key: int, first: int, count: int) -> Tensor:
    """Computes the Gumbel numbers of the ids from `first` to `first` + `count`, fp32 [n, count].

    -log(-log(1 - u)) with u of 32 bits between 0 and 1: the largest numbers, up to 22.9, are the most exact.
    """
    device = place.samples.device
    blocks = torch.arange(first // 4, (first + count + 3) // 4, device=device)[None]
    step, number = (
        torch.full((1, 1), each & _LOW, dtype=torch.int64, device=device) for each in (place.step, place.number)
    )
    words = philox((blocks, number, place.samples[:, None], step), key)
    bits = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, first % 4 : first % 4 + count]
    u = bits.bitwise_and(_LOW).to(torch.float32).add_(0.5).mul_(2.0**-32)
    return u.neg_().log1p_().neg_().log_().neg_()


class Sampler:
    """Draws tokens in a forward pass, in place of a loss; an `engines.objective.Objective`.

    Args:
        temperature: temperature of the sampling; 0 takes the likeliest token.
        key: 64-bit key of the noise (`noise_key`).
    """

    def __init__(self, temperature: float, *, key: int) -> None:
        self._temperature, self._key = temperature, key
        self._place: Place | None = None
        self._seen = 0
        self._drawn: list[Tensor] = []
        self.parts: tuple[str, ...] = ()

    def begin(self, place: Place) -> None:
        """Sets where the next forward pass draws."""
        self._place, self._seen, self._drawn = place, 0, []

    def tokens(self) -> Tensor:
        """Returns the tokens that the last forward pass drew, int64 [n]; equal on all ranks of the vocabulary."""
        return torch.cat(self._drawn)

    def extra_targets(self, _batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns no targets besides the labels."""
        return ()

    def __call__(
        self, logits: Tensor, labels: Tensor, *_extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """Draws from the logits in the place's column; logits are in the order of the flattened batch."""
        assert self._place is not None
        place, before = self._place, self._seen
        self._seen += labels.numel()
        skipped = (place.column - before) % place.width
        rows = logits.flatten(0, -2)[skipped :: place.width]
        if len(rows):
            self._drawn.append(self._draw(rows.float(), (before + skipped) // place.width, place, vocabulary))
        return Loss(torch.zeros((), device=logits.device))

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Loss, Tensor]:
        """Is not used: no gradient goes through the sampling."""
        raise NotImplementedError

    def _draw(self, rows: Tensor, first: int, place: Place, vocabulary: VocabularyShard) -> Tensor:
        if self._temperature:
            own = Place(place.width, place.column, place.samples[first : first + len(rows)], place.step, place.number)
            noise = gumbel(own, key=self._key, first=vocabulary.first, count=rows.shape[1])
            rows = rows.div(self._temperature).add_(noise)
        highest, token = rows.max(dim=-1)
        token = token + vocabulary.first
        if vocabulary.group is None:
            return token
        both = torch.stack([highest.double(), token.double()])
        ranks = dist.get_world_size(vocabulary.group)
        all_ranks = both.new_empty((ranks * 2, len(rows)))
        dist.all_gather_into_tensor(all_ranks, both, group=vocabulary.group)
        highest, token = all_ranks.view(ranks, 2, len(rows)).unbind(1)
        return token.gather(0, highest.argmax(0, keepdim=True)).squeeze(0).long()
