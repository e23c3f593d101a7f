"""Batch arithmetic, stated once: samples per step = micro-batch x accumulation x dp.

DeepSpeed's three keys keep their meaning: any one of them may be left out, and follows from the other two and dp.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError
from pipeline.config.schema import Config


@dataclass(frozen=True)
class Batch:
    """How one optimizer step is cut up.

    Attributes:
        samples: samples per step over all ranks.
        micro: samples per forward pass of one rank.
        accumulation: forward passes per rank and step.
        dp: data-parallel ranks.
        sequence_length: tokens per sample.
    """

    samples: int
    micro: int
    accumulation: int
    dp: int
    sequence_length: int

    @property
    def tokens(self) -> int:
        """Tokens per step over all ranks."""
        return self.samples * self.sequence_length

    def __str__(self) -> str:
        return (
            f"{self.samples} samples per step = {self.micro} per micro-batch x {self.accumulation} accumulated"
            f" x dp {self.dp}; x {self.sequence_length} tokens = {self.tokens:,} tokens per step"
        )


def resolve_batch(config: Config, *, dp: int) -> Batch:
    """Derives what the config leaves out.

    Args:
        config: at least one of the three batch keys is set.
        dp: data-parallel ranks.

    Raises:
        ConfigError: the numbers do not divide or contradict each other; names the nearest that work.
    """
    total, micro, accumulation = cut_batch(
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps, dp=dp
    )
    return Batch(total, micro, accumulation, dp, config.data.sequence_length)


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
