"""Data loader: micro-batches of every optimizer step for one rank, prefetched by one thread.

Worker processes measured 10-50 times slower than a thread: copying a batch between processes costs more than reading it
from a memory map.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.config.accounts import StepAccounts
from pipeline.config.batch import BatchSizes
from pipeline.config.topology import sequence_chunks
from pipeline.data.dataset import TokenDataset, UnknownIdError, choose_windows
from pipeline.data.micro_batch import IGNORE, MicroBatch, StepBatch, apply_loss_mask, cut, make_batch
from pipeline.data.mixture import DataMixture
from pipeline.data.sample_order import SampleLocation
from pipeline.data.skips import NO_SKIPS, Skips
from pipeline.data.step_samples import StepSamples

_COUNTED_STEPS: Final = 16
"""Number of steps whose targets are summed over the ranks together, and how many steps ahead they are summed."""


class TeacherLogits(Protocol):
    """Cached logits of a teacher by sample; see `distillation.cached_logits`."""

    def read(self, location: SampleLocation) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """Ids int32 [n, S, k] and log-probabilities fp16 [n, S, k + 1] of samples."""
        ...


TargetSum = Callable[[Tensor], Callable[[], Tensor]]
"""Begins to sum this rank's targets, int64 [steps], over the data-parallel ranks; returns a function that waits."""


@dataclass(frozen=True)
class _OwnTargets:
    """Target counts of this rank's own samples in some later steps, int64 [steps]."""

    counts: Tensor


class StepLoader:
    """Iterates over the optimizer steps of a run, for one data-parallel rank.

    The samples of a step depend on the step alone, and each rank takes its share. If the samples do not divide evenly,
    every rank has rows for the largest share; surplus rows are padding without targets. With uneven shares
    (`batch.shares`) a rank has its own samples and no padding. The loader can feed any PyTorch loop:
    `for step in StepLoader(...): for micro in step.micro_batches: ...`

    Args:
        mixture: the training samples.
        batch: global batch, micro-batch and gradient accumulation.
        dp_rank: coordinate of this rank on the data-parallel axis.
        steps: (first, last) step, counted from 1, both included.
        cp: context-parallel size: ranks that each hold an equal part of every sequence.
        cp_rank: coordinate of this rank on the context-parallel axis.
        zigzag: whether the rank's part is two separate chunks of the sequence; see `topology.sequence_chunks`.
        mask_documents: whether to apply a document mask: positions restart in each document, and no target crosses a
            document boundary.
        skips: data steps that are skipped.
        accounts: samples of every step of the run; None if all steps are like `batch`.
        logits: a teacher's cached logits, which are added to the micro-batches.
        target_sum: function that sums the targets of all ranks where they do not follow from a step's size (document
            mask, loss mask, packing, fill-in-the-middle); every rank then has to iterate. When None each rank counts
            the targets of the whole step itself, for which it opens the files of all samples.
        prefetch: number of steps prepared ahead.
        pin: whether to copy tensors to page-locked memory, for a GPU.
    """

    def __init__(  # noqa: PLR0913  five are the rank's part, and all but two have defaults
        self,
        mixture: DataMixture,
        batch: BatchSizes,
        *,
        dp_rank: int,
        steps: tuple[int, int],
        cp: int = 1,
        cp_rank: int = 0,
        zigzag: bool = False,
        mask_documents: bool = False,
        skips: Skips = NO_SKIPS,
        accounts: StepAccounts | None = None,
        logits: TeacherLogits | None = None,
        target_sum: TargetSum | None = None,
        prefetch: int = 4,
        pin: bool = False,
    ) -> None:
        self._mixture, self._batch, self._dp_rank, self._pin = mixture, batch, dp_rank, pin
        self._first, self._last = steps
        self._chunks = partial(sequence_chunks, cp=cp, cp_rank=cp_rank, zigzag=zigzag)
        self._mask_documents, self._prefetch, self._logits = mask_documents, prefetch, logits
        self._bounded = mask_documents or mixture.packed or mixture.fim is not None
        # masks in object stores are cached with the step that reads them, and cannot be counted earlier
        here = batch.part is None and not (mixture.masked and mixture.remote.fingerprints)
        self._target_sum = target_sum if here and (self._bounded or mixture.masked) else None
        self._samples = StepSamples(
            mixture,
            batch,
            dp_rank,
            steps,
            skips=skips,
            counts_own=self._target_sum is not None,
            documents=mask_documents or mixture.fim is not None,
            accounts=accounts,
        )

    def __len__(self) -> int:
        return max(0, self._last - self._first + 1)

    def __iter__(self) -> Iterator[StepBatch]:
        remote = self._mixture.remote.ahead
        if remote is not None:
            remote.begin(self._samples.remote_parts(remote.order), step=self._first)
        ready: queue.Queue[StepBatch | _OwnTargets | BaseException] = queue.Queue(self._prefetch)
        stop = threading.Event()
        thread = threading.Thread(target=self._gather_all, args=(ready, stop), name="loader", daemon=True)
        thread.start()
        sums, targets = deque[Callable[[], Tensor]](), deque[int]()
        try:
            for _ in range(len(self)):
                while isinstance(item := ready.get(), _OwnTargets):
                    assert self._target_sum is not None
                    sums.append(self._target_sum(item.counts))
                if isinstance(item, BaseException):
                    raise item
                if self._target_sum is None:
                    yield item
                    continue
                if not targets:
                    targets.extend(sums.popleft()().tolist())
                yield StepBatch.of(item.step, item.micro_batches, targets.popleft())
        finally:
            stop.set()

    def gather(self, step: int) -> StepBatch:
        """Reads this rank's part of a step in the calling thread; counts the targets of the whole step."""
        targets = self._count(self._samples.all(step))
        return self._gather(step, self._mixture.order.locate(self._samples.rows(step)), targets)

    def _gather(self, step: int, location: SampleLocation, targets: int) -> StepBatch:
        batch, samples, fim = self._batch, self._samples.rows(step), self._mixture.fim
        try:
            rows = self._mixture.rows(location)
        except UnknownIdError as error:
            raise error.of_sample(int(samples[error.row])) from None
        own = None
        if self._bounded:
            before = own = self._mixture.boundaries(samples)
            if fim is not None:
                own, rows = fim.boundaries(before, samples), fim.rows(rows, before, samples)
        chunks = self._chunks(batch.sequence_length)
        whole = make_batch(rows, own, mask_documents=self._mask_documents, chunks=chunks)
        if self._mixture.masked:
            apply_loss_mask(whole, self._mixture.loss_mask(location), chunks)
        whole.labels[torch.from_numpy(self._samples.padding)] = IGNORE
        if self._logits is not None:
            read = (torch.from_numpy(np.ascontiguousarray(cut(each, chunks))) for each in self._logits.read(location))
            whole = replace(whole, **dict(zip(("target_ids", "target_logs"), read, strict=True)))
        sizes = batch.micro if batch.shares is None else batch.shares.sizes[self._dp_rank]
        return StepBatch.of(step, [self._own(micro) for micro in whole.split(sizes)], targets)

    def _count(self, samples: npt.NDArray[np.int64]) -> int:
        """Counts the targets of samples (global indices); reads only document boundaries and loss masks, no tokens."""
        length = self._batch.sequence_length
        if not self._bounded and not self._mixture.masked:
            return int(samples.size) * length
        boundaries = self._mixture.boundaries(samples) if self._bounded else None
        if self._mixture.masked:
            loss_mask = self._mixture.loss_mask(self._mixture.order.locate(samples))[:, 1:]
            if boundaries is not None:
                boundaries.clear_non_targets(loss_mask, masked=self._mask_documents)
            return int(loss_mask.sum())
        assert boundaries is not None
        if self._mixture.fim is not None:
            boundaries = self._mixture.fim.boundaries(boundaries, samples)
        return int(samples.size) * length - boundaries.count_non_targets(length=length, masked=self._mask_documents)

    def _own_targets(self, first: int) -> _OwnTargets:
        steps = range(first, min(first + _COUNTED_STEPS, self._last + 1))
        return _OwnTargets(
            torch.tensor([self._count(self._samples.counted(step)) for step in steps], dtype=torch.int64)
        )

    def _own(self, micro: MicroBatch) -> MicroBatch:
        """Makes a micro-batch contiguous, in page-locked memory for a GPU: a strided view would be copied once more."""
        return micro.pin_memory() if self._pin else micro

    def _gather_all(self, ready: queue.Queue[StepBatch | _OwnTargets | BaseException], stop: threading.Event) -> None:
        for item in self._items():
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if stop.is_set():
                return

    def _items(self) -> Iterator[StepBatch | _OwnTargets | BaseException]:
        """Yields steps; before every `_COUNTED_STEPS`-th one, also the rank's own target counts of later steps."""
        try:
            for step, location in self._samples.located():
                targets = 0
                if self._target_sum is None:
                    targets = self._count(self._samples.counted(step))
                elif (step - self._first) % _COUNTED_STEPS == 0:
                    nexts = [step + _COUNTED_STEPS] if step > self._first else [step, step + _COUNTED_STEPS]
                    yield from (self._own_targets(first) for first in nexts if first <= self._last)
                yield self._gather(step, location, targets)
        except GeneratorExit:
            raise
        except BaseException as error:  # the consuming thread raises it
            yield error


def heldout_batches(  # noqa: PLR0913  five are the rank's part
    dataset: TokenDataset,
    *,
    batch_size: int,
    dp: int,
    dp_rank: int,
    cp: int = 1,
    cp_rank: int = 0,
    zigzag: bool = False,
    mask_documents: bool = False,
    samples: int | None = None,
) -> Iterator[MicroBatch]:
    """Batches of the windows of a held-out split in order, for one rank.

    Every rank gets the same number of batches of the same shape, since sharded engines run in lockstep: rows past the
    end are padding, whose labels are IGNORE.

    Args:
        dataset: the split.
        batch_size: samples per batch of a rank.
        dp, cp: number of ranks on the data-parallel and the context-parallel axis.
        dp_rank, cp_rank: coordinates of this rank on these axes.
        zigzag: whether the rank's part is two separate chunks of the sequence; see `topology.sequence_chunks`.
        mask_documents: whether positions restart in each document, and no target crosses a document boundary.
        samples: number of windows to evaluate, evenly spaced over the split; all if None.
    """
    chosen = choose_windows(dataset.windows, samples)

    def windows_from(start: int) -> npt.NDArray[np.int64]:
        return chosen[np.minimum(start + dp_rank * batch_size + np.arange(batch_size), chosen.size - 1)]

    for start in range(0, chosen.size, batch_size * dp):
        mine = start + dp_rank * batch_size + np.arange(batch_size)
        windows = windows_from(start)
        if start == 0:
            dataset.read_ahead(windows)
        if start + batch_size * dp < chosen.size:
            dataset.read_ahead(windows_from(start + batch_size * dp))
        boundaries = dataset.boundaries(windows) if mask_documents else None
        rows = dataset.rows(windows)
        chunks = sequence_chunks(rows.shape[1] - 1, cp=cp, cp_rank=cp_rank, zigzag=zigzag)
        batch = make_batch(rows, boundaries, chunks=chunks)
        if dataset.masked:
            apply_loss_mask(batch, dataset.loss_mask(windows), chunks)
        batch.labels[torch.from_numpy(mine >= chosen.size)] = IGNORE
        yield batch
