"""The samples of a rank in each step of a run: their numbers, locations and readahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from pipeline.config.accounts import StepAccounts
from pipeline.config.batch import BatchSizes
from pipeline.data.mixture import DataMixture
from pipeline.data.read_ahead import Index
from pipeline.data.sample_order import SampleLocation
from pipeline.data.skips import Skips
from pipeline.data.span_cache import Part

_LOCATED_ROWS: Final = 2048
_LOCATED_TOKENS: Final = 1 << 24
"""Largest numbers of rows and of tokens that are located together and read ahead: some 32 MB."""
PARTS_IN_CACHE: Final = 4
"""Least number of groups of steps, with the data of all ranks, that fit into the cache for object stores."""


class StepSamples:
    """The samples of one data-parallel rank, for the steps of a run.

    Args:
        mixture: the training samples.
        batch: global batch, micro-batch and gradient accumulation.
        dp_rank: coordinate of this rank on the data-parallel axis.
        steps: (first, last) step, counted from 1, both included.
        skips: data steps that are skipped.
        counts_own: whether the rank counts only the targets of its own samples, not of the whole step.
        documents: whether document boundaries of the samples are read.
        accounts: samples of every step of the run; None if all steps are like `batch`.
    """

    def __init__(
        self,
        mixture: DataMixture,
        batch: BatchSizes,
        dp_rank: int,
        steps: tuple[int, int],
        *,
        skips: Skips,
        counts_own: bool,
        documents: bool,
        accounts: StepAccounts | None = None,
    ) -> None:
        self._mixture, self._batch, self._skips = mixture, batch, skips
        self._accounts = accounts or StepAccounts.constant(batch.samples, batch.sequence_length, steps[1])
        self._first, self._last = steps
        self._counts_own, self._documents = counts_own, documents
        self._of_rows = samples_of_rows(batch, dp_rank)

    @property
    def padding(self) -> npt.NDArray[np.bool_]:
        """Mask of the rows of a step that are padding: bool [rows]."""
        return self._of_rows >= self._batch.samples

    def all(self, step: int) -> npt.NDArray[np.int64]:
        """Returns the global numbers of all samples of a step."""
        return np.asarray(self._first_sample(step) + np.arange(self._batch.samples), dtype=np.int64)

    def counted(self, step: int) -> npt.NDArray[np.int64]:
        """Global numbers of the samples of a step whose targets this rank counts: those in its own rows, or all."""
        if not self._counts_own:
            return self.all(step)
        return np.asarray(self._first_sample(step) + self._of_rows[~self.padding], dtype=np.int64)

    def _first_sample(self, step: int) -> int:
        return self._skips.samples(step, self._accounts)[0]

    def rows(self, step: int) -> npt.NDArray[np.int64]:
        """Returns the global sample numbers of this rank's rows of a step; padding rows repeat the last sample."""
        rows = np.minimum(self._of_rows, self._batch.samples - 1)
        return np.asarray(self._first_sample(step) + rows, dtype=np.int64)

    def located(self) -> Iterator[tuple[int, SampleLocation]]:
        """Yields every step with the locations of its rows; computing them for many steps together is cheaper.

        Readahead of the next group is requested while the current one is used, so that a slow file system reads
        concurrently and in advance. It includes the loss masks of the samples whose targets this rank counts.
        """
        ahead: tuple[range, SampleLocation] | None = None
        for steps in self._groups():
            location = self._locate(steps)
            self._mixture.read_ahead(location, self._locate_counted(steps, self._mixture.masked), step=steps.start)
            if ahead is not None:
                if self._mixture.remote.ahead is not None:
                    self._mixture.remote.ahead.at(ahead[0].start)
                yield from _by_step(*ahead)
            ahead = steps, location
        if ahead is not None:
            yield from _by_step(*ahead)

    def _groups(self) -> Iterator[range]:
        """Yields groups of steps that are located and read ahead together.

        With a cache, groups begin at multiples of their size, a power of two, whatever the first step is. A resumed run
        therefore finds the cached groups, except for the first few.
        """
        most = min(_LOCATED_ROWS, _LOCATED_TOKENS // self._batch.sequence_length)
        counts_all_masks = self._mixture.masked and not self._counts_own
        per_step = self._batch.samples if counts_all_masks else self._of_rows.size
        together = max(1, most // per_step)
        remote, step = self._mixture.remote.ahead, self._first
        if remote is not None:
            step_bytes = step_bytes_of(self._batch, masked=self._mixture.masked)
            together = largest_power_of_two(min(together, remote.cache.limit // (PARTS_IN_CACHE * step_bytes)))
        size = together if remote is None else 1
        while step <= self._last:
            end = step + size
            if remote is not None:
                end = step + min(size, _lowest_bit(step) or size)
                size = min(together, 2 * size)
            yield range(step, min(end, self._last + 1))
            step = end

    def _locate(self, steps: range) -> SampleLocation:
        return self._mixture.order.locate(np.concatenate([self.rows(step) for step in steps]))

    def _locate_counted(self, steps: range, wanted: bool) -> SampleLocation | None:
        if not wanted:
            return None
        return self._mixture.order.locate(np.concatenate([self.counted(step) for step in steps]))

    def remote_parts(self, order: str) -> Iterator[Part | Index]:
        """Yields the parts that all steps read from object stores, in order."""
        mixture, known = self._mixture, set[str]()
        for steps in self._groups():
            bounded = self._locate_counted(steps, self._documents)
            for prefix in [] if bounded is None else mixture.remote_shards(bounded):
                if prefix not in known:
                    known.add(prefix)
                    yield mixture.remote.index(prefix)
            for spans in mixture.remote_parts(self._locate(steps), self._locate_counted(steps, mixture.masked)):
                if spans:
                    yield Part(order, steps.start, tuple(spans))


def step_bytes_of(batch: BatchSizes, *, masked: bool) -> int:
    """Upper limit of the bytes that all ranks read from an object store in a step: ids of 4 bytes, and loss masks."""
    return batch.samples * (batch.sequence_length + 1) * (5 if masked else 4)


def largest_power_of_two(limit: int) -> int:
    """Returns the largest power of two that is at most `limit`, and at least 1."""
    return 1 << max(0, limit.bit_length() - 1)


def _lowest_bit(number: int) -> int:
    return number & -number


def samples_of_rows(batch: BatchSizes, dp_rank: int) -> npt.NDArray[np.int64]:
    """Index in the step of each row of a rank, over its micro-batches; indices from `batch.samples` on are padding."""
    if batch.shares is not None:
        return np.asarray(batch.shares.samples(dp_rank), dtype=np.int64)
    starts = dp_rank * batch.micro + np.arange(batch.accumulation) * batch.dp * batch.micro
    rows: npt.NDArray[np.int64] = (starts[:, None] + np.arange(batch.micro)).ravel()
    if batch.part is None:
        return rows
    samples = np.concatenate([np.arange(first, end) for first, end in batch.part])
    return np.where(rows < samples.size, samples[np.minimum(rows, samples.size - 1)], batch.samples)


def most_on_a_rank(batch: BatchSizes, samples: npt.NDArray[np.int64]) -> int:
    """Counts the given samples of a step on the rank that has the most of them."""
    return int(np.bincount(samples // batch.micro % batch.dp, minlength=1).max())


def _by_step(steps: range, location: SampleLocation) -> Iterator[tuple[int, SampleLocation]]:
    sources, windows = (np.split(column, len(steps)) for column in (location.source, location.window))
    for step, source, window in zip(steps, sources, windows, strict=True):
        yield step, SampleLocation(source, window)
