"""Uneven shares of a data-parallel batch: how many samples of a step each data-parallel rank takes. Pure integers.

A step has the same samples whatever the shares. A rank takes a contiguous range of them, and the loss is a sum over all
ranks' targets divided by the number of targets. So shares change which rank computes a sample, not the loss curve.

No micro-batch is larger than the configured one, which is known to fit into memory: a rank with a larger share runs
more micro-batches. Three rules follow from the layout:

- independent: no data-parallel collective in a micro-batch (ZeRO stages 0 and 1). Every rank runs as many micro-batches
  as it needs.
- lockstep: every micro-batch is a collective (ZeRO stages 2 and 3). All ranks run the same number of micro-batches, of
  different sizes.
- whole micro-batches: the shapes of a pipeline, and of compiled layers, stay the same. A rank takes more or fewer
  micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

PASS_OVERHEAD = 0.25
"""Fixed cost of a micro-batch, in samples, as in `config.batch`. An estimate; it decides between equal divisions."""


@dataclass(frozen=True)
class Shares:
    """Samples of a step by data-parallel rank.

    Attributes:
        sizes: sizes of every data-parallel rank's micro-batches, in samples.
    """

    sizes: tuple[tuple[int, ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of every data-parallel rank."""
        return tuple(map(sum, self.sizes))

    @property
    def most_micro_batches(self) -> int:
        """Largest number of micro-batches of a rank."""
        return max(map(len, self.sizes))

    def samples(self, dp_rank: int) -> range:
        """Returns a rank's samples, as indices in the step."""
        ends = list(accumulate(self.counts))
        return range(ends[dp_rank] - self.counts[dp_rank], ends[dp_rank])

    def place(self, sample: int) -> tuple[int, int]:
        """Returns (data-parallel rank, micro-batch) of a sample, given by its index in the step."""
        dp_rank = next(rank for rank, end in enumerate(accumulate(self.counts)) if sample < end)
        within = sample - self.samples(dp_rank).start
        return dp_rank, next(n for n, end in enumerate(accumulate(self.sizes[dp_rank])) if within < end)

    def __str__(self) -> str:
        return "samples per data rank " + shown(self.counts)


@dataclass(frozen=True)
class ShareRule:
    """Rule by which the samples of a step may be divided in a layout (see the module's docstring).

    Attributes:
        samples: global batch size, in samples.
        dp: data-parallel ranks.
        micro: largest micro-batch, in samples.
        lockstep: whether all ranks run the same number of micro-batches.
        unit: number of micro-batches assigned together, of exactly `micro` samples each; 0 where any number of samples
            may be assigned.
        least: smallest number of units of a rank, or of samples where the unit is 0.
    """

    samples: int
    dp: int
    micro: int
    lockstep: bool = False
    unit: int = 0
    least: int = 1

    @property
    def shapes_change(self) -> bool:
        """Whether micro-batches of a run may have different sizes."""
        return not self.unit and (self.lockstep or self.micro > 1)

    def divide(self, weights: Sequence[float]) -> Shares:
        """Divides a step's samples in proportion to weights, by largest remainder.

        In lockstep no rank can have more than `micro` times the samples of another rank. Where the weights ask for
        more, the division with the shortest step is chosen.

        Args:
            weights: positive, one per data-parallel rank.
        """
        assert len(weights) == self.dp, weights
        assert min(weights) > 0, weights
        if self.unit:
            units = largest_remainder(weights, self.samples // (self.unit * self.micro), least=self.least)
            return Shares(tuple((self.micro,) * (self.unit * each) for each in units))
        counts = largest_remainder(weights, self.samples, least=self.least)
        if not self.lockstep:
            return Shares(tuple(even_parts(each, -(-each // self.micro)) for each in counts))
        accumulation = -(-max(counts) // self.micro)
        if min(counts) >= accumulation:
            return Shares(tuple(even_parts(each, accumulation) for each in counts))
        seconds = [1 / weight for weight in weights]
        return min(self._in_lockstep(weights), key=lambda shares: self.seconds(shares, seconds))

    def _in_lockstep(self, weights: Sequence[float]) -> Iterator[Shares]:
        """Yields the best division for every number of micro-batches that leaves no micro-batch of a rank empty."""
        for count in range(-(-self.samples // (self.dp * self.micro)), self.samples // self.dp + 1):
            counts = largest_remainder(weights, self.samples, least=count, most=count * self.micro)
            yield Shares(tuple(even_parts(each, count) for each in counts))

    def seconds(self, shares: Shares, seconds_per_sample: Sequence[float]) -> float:
        """Estimates the seconds of a step's passes without communication; all ranks wait for the slowest.

        Args:
            shares: a division by this rule.
            seconds_per_sample: seconds per sample of every data-parallel rank.
        """
        ranks = [
            [(size + PASS_OVERHEAD) * seconds for size in sizes]
            for sizes, seconds in zip(shares.sizes, seconds_per_sample, strict=True)
        ]
        return sum(map(max, zip(*ranks, strict=True))) if self.lockstep else max(map(sum, ranks))


def largest_remainder(weights: Sequence[float], total: int, *, least: int, most: int | None = None) -> tuple[int, ...]:
    """Divides `total` into integers in proportion to weights (Hamilton's method), each within bounds.

    Each unit goes to the rank furthest below its quota (the lowest of several ranks). If no bound binds, each integer
    is its quota rounded down, or up where the remainder is largest.

    Args:
        weights: positive.
        total: sum of the integers, at least `least` for each, and at most `most`.
        least, most: bounds of every integer.
    """
    most = total if most is None else most
    assert least * len(weights) <= total <= most * len(weights), (weights, total, least, most)
    quotas = [total * weight / sum(weights) for weight in weights]
    counts = [least] * len(weights)
    below = [(least - quota, rank) for rank, quota in enumerate(quotas)]
    heapq.heapify(below)
    for _ in range(total - sum(counts)):
        _, rank = below[0]
        counts[rank] += 1
        if counts[rank] < most:
            heapq.heapreplace(below, (counts[rank] - quotas[rank], rank))
        else:
            heapq.heappop(below)
    return tuple(counts)


def even_parts(total: int, count: int) -> tuple[int, ...]:
    """Divides `total` into `count` integers that differ by one at most, the larger ones first."""
    part, rest = divmod(total, count)
    return (part + 1,) * rest + (part,) * (count - rest)


def shown(counts: Sequence[int]) -> str:
    """Formats samples by rank for people, with equal neighbours together: "3 x 2, 2"."""
    runs: list[tuple[int, int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1] = (count, runs[-1][1] + 1)
        else:
            runs.append((count, 1))
    return ", ".join(f"{count}" if times == 1 else f"{count} (x {times})" for count, times in runs)
