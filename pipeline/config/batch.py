"""Batch sizes: global batch = micro-batch x gradient accumulation x data-parallel ranks.

DeepSpeed's three keys keep their meaning: any one may be absent and is then derived from the other two and dp.

An elastic run (`parallel.elastic`, or a resume on another number of processes) keeps its global batch size whatever dp
is. Every data rank runs the same number of micro-batches of equal size, since sharded and pipelined engines run in
lockstep. Rows beyond the global batch are padding: they have no targets, and losses are sums over targets. With uneven
shares (`parallel.shares`) ranks run different rows and nothing is padded: `config.rules.shares`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foundation.errors import ConfigError
from pipeline.config.sections.run import Config
from pipeline.config.shares import Shares

_PASS_OVERHEAD = 0.25
"""Fixed cost of a forward and backward pass, in rows. An estimate: it decides between splits of nearly equal cost."""

_CANDIDATES = 1 << 16
"""Number of micro-batch sizes that are compared, from the largest down: any batch is split in milliseconds."""


@dataclass(frozen=True)
class BatchSizes:
    """Split of one optimizer step into micro-batches.

    Attributes:
        samples: global batch size, in samples per optimizer step over all ranks.
        micro: micro-batch size, in rows per forward pass of one rank; with shares the largest of all micro-batches.
        accumulation: gradient accumulation steps: micro-batches per rank and optimizer step; with shares the largest
            number of any rank.
        dp: data-parallel ranks.
        sequence_length: tokens per sample.
        adjusted_fields: config fields with the values that were replaced for this number of ranks.
        shares: samples of every data-parallel rank where ranks have different numbers of rows (`parallel.shares`); None
            otherwise.
        part: (first, end) ranges of the step's samples that are run here, in micro-batches as above; other replicas of
            the model run the rest. None for all samples.
    """

    samples: int
    micro: int
    accumulation: int
    dp: int
    sequence_length: int
    adjusted_fields: tuple[str, ...] = ()
    shares: Shares | None = None
    part: tuple[tuple[int, int], ...] | None = None

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step over all ranks, without padding rows."""
        return self.samples * self.sequence_length

    @property
    def rows(self) -> int:
        """Rows that go through the model per optimizer step, over all ranks: samples and padding."""
        if self.shares is not None:
            return self.samples
        return self.micro * self.accumulation * self.dp

    @property
    def padding_rows(self) -> int:
        """Rows of a step that are padding."""
        return self.rows - self.samples

    def with_shares(self, shares: Shares) -> BatchSizes:
        """Returns this global batch divided into other shares."""
        return replace(self, shares=shares, accumulation=shares.most_micro_batches)

    def with_samples(self, samples: int) -> BatchSizes:
        """Returns the sizes of a step with another number of samples, in micro-batches of the same size."""
        if samples == self.samples:
            return self
        return replace(self, samples=samples, accumulation=-(-samples // (self.micro * self.dp)))

    def __str__(self) -> str:
        split = f"micro-batch {self.micro} x accumulation {self.accumulation} x dp {self.dp}"
        padding = f" less {self.padding_rows} of {self.rows} rows, which are padding" if self.padding_rows else ""
        if self.shares is not None:
            split = f"{self.shares}, in up to {self.accumulation} micro-batches of up to {self.micro}"
        tokens = f"x {self.sequence_length} tokens = {self.tokens:,} tokens per step"
        adjusted = f" (adjusted: {' and '.join(self.adjusted_fields)})" if self.adjusted_fields else ""
        return f"{self.samples} samples per step = {split}{padding}{adjusted}; {tokens}"


def resolve_batch(
    config: Config,
    *,
    dp: int,
    elastic: bool = False,
    min_micro_batches: int = 1,
    multiple_of: int = 1,
    model_ranks: int = 1,
) -> BatchSizes:
    """Derives the batch sizes that the config leaves out.

    Args:
        config: the config; at least one of the three batch keys is set.
        dp: data-parallel ranks.
        elastic: whether to pad a batch that does not divide, and derive the accumulation from dp.
        min_micro_batches: smallest accumulation that the pipeline schedule supports.
        multiple_of: number that must divide the accumulation.
        model_ranks: processes of one data rank, pp x cp x tp, for remedies.

    Raises:
        ConfigError: the numbers do not divide or contradict each other; the error names the nearest valid ones.
    """
    total, micro = config.largest_batch, config.train_micro_batch_size_per_gpu
    accumulation, length = config.gradient_accumulation_steps, config.data.sequence_length
    if config.parallel.elastic or config.launch.fallback_layouts:
        _require_fixed_sizes(config)
    if not elastic or total is None:
        return BatchSizes(*split_batch(total, micro, accumulation, dp=dp, model_ranks=model_ranks), dp, length)
    largest = micro or -(-total // (dp * (accumulation or 1)))  # micro-batches as for a batch that divides
    split = split_padded_batch(total, largest, dp=dp, min_micro_batches=min_micro_batches, multiple_of=multiple_of)
    given = {
        "train_micro_batch_size_per_gpu": (micro, split[0]),
        "gradient_accumulation_steps": (accumulation, split[1]),
    }
    adjusted = tuple(f"{key} {before}" for key, (before, after) in given.items() if before not in (None, after))
    return BatchSizes(total, *split, dp, length, adjusted)


def _require_fixed_sizes(config: Config) -> None:
    """Refuses sizes that follow the number of processes: the curve would change, or a micro-batch might not fit."""
    for field in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if getattr(config, field) is None:
            why = "parallel.elastic is true, and without this key the batch would depend on the number of processes"
            if config.launch.fallback_layouts:
                why = "launch.fallback_layouts is given, and without this key the batch would depend on the layout"
            raise ConfigError(field, why=why, remedy=f'add "{field}": a fixed number')


def split_padded_batch(
    total: int, largest: int, *, dp: int, min_micro_batches: int = 1, multiple_of: int = 1
) -> tuple[int, int]:
    """Finds the cheapest split of a global batch over any number of ranks, padded where it does not divide.

    A smaller micro-batch needs fewer padding rows, but more passes. No micro-batch is larger than the config's, which
    is known to fit into memory.

    Args:
        total: samples per optimizer step.
        largest: upper bound of the micro-batch size.
        dp: data-parallel ranks.
        min_micro_batches, multiple_of: smallest accumulation, and number that must divide the accumulation.

    Returns:
        Micro-batch size and gradient accumulation steps.
    """

    def accumulation(micro: int) -> int:
        needed = max(min_micro_batches, -(-total // (micro * dp)))
        return -(-needed // multiple_of) * multiple_of

    largest = min(largest, -(-total // dp))  # a larger one only adds padding
    smallest = max(1, largest - _CANDIDATES)
    micro = min(
        range(smallest, largest + 1), key=lambda micro: (accumulation(micro) * (micro + _PASS_OVERHEAD), -micro)
    )
    return micro, accumulation(micro)


def part_of_batch(
    batch: BatchSizes,
    ranges: Sequence[tuple[int, int]],
    *,
    shapes_change: bool,
    min_micro_batches: int = 1,
    multiple_of: int = 1,
) -> BatchSizes:
    """Splits a part of a step's samples into micro-batches no larger than the whole step's.

    Args:
        batch: batch sizes of the whole step.
        ranges: (first, end) indices of the part's samples in the step; one sample or more.
        shapes_change: whether micro-batches may be smaller; otherwise there is more padding.
        min_micro_batches, multiple_of: smallest accumulation, and number that must divide the accumulation.
    """
    count = sum(end - first for first, end in ranges)
    limits = {"dp": batch.dp, "min_micro_batches": min_micro_batches, "multiple_of": multiple_of}
    if shapes_change:
        micro, accumulation = split_padded_batch(count, batch.micro, **limits)
    else:
        micro, needed = batch.micro, max(min_micro_batches, -(-count // (batch.micro * batch.dp)))
        accumulation = -(-needed // multiple_of) * multiple_of
    return replace(batch, micro=micro, accumulation=accumulation, shares=None, part=tuple(ranges))


def split_batch(
    total: int | None, micro: int | None, accumulation: int | None, *, dp: int, model_ranks: int = 1
) -> tuple[int, int, int]:
    """Derives whichever of global batch size, micro-batch size and gradient accumulation steps is missing.

    Args:
        total, micro, accumulation: the config's values of these three; None where absent.
        dp: data-parallel ranks.
        model_ranks: processes of one data rank, for remedies.

    Raises:
        ConfigError: the numbers do not divide or contradict each other; the error names the nearest valid ones.
    """
    if total is None:
        if micro is None:
            why = "neither it nor train_micro_batch_size_per_gpu is given"
            if accumulation is not None:
                why += f", and gradient_accumulation_steps {accumulation} alone is no batch size"
            remedy = f'add "train_batch_size": {8 * (accumulation or 1) * dp}, or another number of samples per step'
            raise ConfigError("train_batch_size", why=why, remedy=remedy)
        accumulation = accumulation or 1
        total = micro * accumulation * dp
    if micro is None:
        accumulation = accumulation or 1
        by = f"dp {dp} x gradient_accumulation_steps {accumulation}"
        _check_divides(total, dp * accumulation, by=by, unit=dp, dp=dp, model_ranks=model_ranks)
        micro = total // (dp * accumulation)
    by = f"dp {dp} x train_micro_batch_size_per_gpu {micro}"
    _check_divides(total, dp * micro, by=by, unit=dp * micro, micro=micro, dp=dp, model_ranks=model_ranks)
    derived = total // (dp * micro)
    if accumulation is not None and accumulation != derived:
        fitting, rest = divmod(total, micro * accumulation)
        started = "" if rest else f", or {_started(fitting * model_ranks)}"
        raise ConfigError(
            "gradient_accumulation_steps",
            accumulation,
            why=f"train_batch_size {total} = micro-batch {micro} x accumulation x dp {dp} needs {derived}",
            remedy=f"set it to {derived}, or leave it out to derive it from the others{started}",
        )
    return total, micro, derived


def _started(processes: int) -> str:
    return f"start {processes} processes (headrace check --processes {processes})"


def _check_divides(
    total: int, part: int, *, by: str, unit: int, dp: int, model_ranks: int, micro: int | None = None
) -> None:
    if total % part == 0:
        return
    below, above = total // part * part, (total // part + 1) * part
    near = f"{below} or {above}" if below else str(above)
    remedy = f"use {near}"
    if unit > 1:
        fewer = [ranks for ranks in range(1, dp) if total % (part // dp * ranks) == 0]
        remedy += f", {_started(fewer[-1] * model_ranks)}" if fewer else ""
        remedy += ", or parallel.elastic true, which pads the batch"
        if micro is None:
            remedy += f", with a fixed train_micro_batch_size_per_gpu such as {max(1, total // part)}"
    raise ConfigError("train_batch_size", total, why=f"it is not divisible by {by}", remedy=remedy)
