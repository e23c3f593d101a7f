"""Batch arithmetic, stated once: samples per step = micro-batch x accumulation x dp.

DeepSpeed's three keys keep their meaning: any one of them may be left out, and follows from the other two and dp.

A run that goes on with the processes that are left (`parallel.elastic`) keeps its samples per step, whatever dp is.
Every data rank does equally many micro-batches of equal size, since sharded and pipelined engines run in step; the rows
left over are filling: they have no targets, and losses are sums over targets.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.errors import ConfigError
from pipeline.config.schema import Config

_PASS = 0.25
"""What a forward and backward pass costs besides its rows, in rows. A judgement: it decides where cuts are close."""


@dataclass(frozen=True)
class BatchSizes:
    """How one optimizer step is cut up.

    Attributes:
        samples: samples per step over all ranks.
        micro: rows per forward pass of one rank.
        accumulation: forward passes per rank and step.
        dp: data-parallel ranks.
        sequence_length: tokens per sample.
        gave_way: fields of the config that were changed for this number of ranks, in words.
    """

    samples: int
    micro: int
    accumulation: int
    dp: int
    sequence_length: int
    gave_way: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens per step over all ranks, without filling."""
        return self.samples * self.sequence_length

    @property
    def rows(self) -> int:
        """Rows that go through the model in a step, over all ranks: samples and filling."""
        return self.micro * self.accumulation * self.dp

    @property
    def filling(self) -> int:
        """Rows of a step that are no samples."""
        return self.rows - self.samples

    def __str__(self) -> str:
        cut = f"{self.micro} per micro-batch x {self.accumulation} accumulated x dp {self.dp}"
        filled = f" less {self.filling} of {self.rows} rows, which are filling" if self.filling else ""
        tokens = f"x {self.sequence_length} tokens = {self.tokens:,} tokens per step"
        gave_way = f" ({' and '.join(self.gave_way)} gave way)" if self.gave_way else ""
        return f"{self.samples} samples per step = {cut}{filled}{gave_way}; {tokens}"


def resolve_batch(config: Config, *, dp: int, elastic: bool = False, least: int = 1, rounds: int = 1) -> BatchSizes:
    """Derives what the config leaves out.

    Args:
        config: at least one of the three batch keys is set.
        dp: data-parallel ranks.
        elastic: what does not divide is filled up, and the accumulation follows from dp.
        least: micro-batches that a pipeline needs.
        rounds: what their number must be a multiple of.

    Raises:
        ConfigError: the numbers do not divide or contradict each other; names the nearest that work.
    """
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation, length = config.gradient_accumulation_steps, config.data.sequence_length
    if config.parallel.elastic:
        _says_what_stays(config)
    if not elastic or total is None or micro is None:  # without it nobody knows what fits into memory
        return BatchSizes(*cut_batch(total, micro, accumulation, dp=dp), dp, length)
    cut = fill_batch(total, micro, dp=dp, least=least, rounds=rounds)
    given = {
        "train_micro_batch_size_per_gpu": (micro, cut[0]),
        "gradient_accumulation_steps": (accumulation, cut[1]),
    }
    gave_way = tuple(f"{key} {was}" for key, (was, now) in given.items() if was not in (None, now))
    return BatchSizes(total, *cut, dp, length, gave_way)


def _says_what_stays(config: Config) -> None:
    """A batch that followed the number of processes would make another curve, a micro-batch might not fit."""
    for field in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if getattr(config, field) is None:
            why = "parallel.elastic is true, and it would follow the number of processes"
            raise ConfigError(field, why=why, remedy="give it: neither is to change when there are fewer of them")


def fill_batch(total: int, largest: int, *, dp: int, least: int = 1, rounds: int = 1) -> tuple[int, int]:
    """The cheapest cut of a step over any number of ranks.

    A smaller micro-batch wastes fewer rows on filling, but takes more passes. None is larger than the config's: that
    one is known to fit into memory.

    Args:
        total: samples per step.
        largest: rows per forward pass of a rank, at most.
        dp: data-parallel ranks.
        least, rounds: as `resolve_batch`.

    Returns:
        Rows per forward pass, and passes per rank and step.
    """

    def passes(micro: int) -> int:
        needed = max(least, -(-total // (micro * dp)))
        return -(-needed // rounds) * rounds

    micro = min(range(1, largest + 1), key=lambda micro: (passes(micro) * (micro + _PASS), -micro))
    return micro, passes(micro)


def cut_batch(total: int | None, micro: int | None, accumulation: int | None, *, dp: int) -> tuple[int, int, int]:
    """Samples per step, per forward pass of a rank, and forward passes per rank and step, from what is given of them.

    Raises:
        ConfigError: the numbers do not divide or contradict each other; names the nearest that work.
    """
    if total is None:
        if micro is None:
            why = "neither it nor train_micro_batch_size_per_gpu is given"
            raise ConfigError("train_batch_size", why=why, remedy='add "train_batch_size": samples per step')
        accumulation = accumulation or 1
        total = micro * accumulation * dp
    if micro is None:
        accumulation = accumulation or 1
        _divides(total, dp * accumulation, by=f"dp {dp} x gradient_accumulation_steps {accumulation}", unit=dp)
        micro = total // (dp * accumulation)
    _divides(total, dp * micro, by=f"dp {dp} x train_micro_batch_size_per_gpu {micro}", unit=dp * micro)
    derived = total // (dp * micro)
    if accumulation is not None and accumulation != derived:
        raise ConfigError(
            "gradient_accumulation_steps",
            accumulation,
            why=f"train_batch_size {total} = micro-batch {micro} x accumulation x dp {dp} needs {derived}",
            remedy=f"set it to {derived}, or leave it out and it follows from the others",
        )
    return total, micro, derived


def _divides(total: int, part: int, *, by: str, unit: int) -> None:
    if total % part == 0:
        return
    below, above = total // part * part, (total // part + 1) * part
    near = f"{below} or {above}" if below else str(above)
    remedy = f"use {near}" + (f", or a number of processes that divides {total}" if unit > 1 else "")
    raise ConfigError("train_batch_size", total, why=f"it is not divisible by {by}", remedy=remedy)
