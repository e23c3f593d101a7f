"""Data loader: micro-batches of every optimizer step for one rank, prefetched by one thread.

Worker processes were measured to be 10-50 times slower than a thread: copying a batch between processes costs more
than reading it from a memory map.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.config.batch import BatchSizes
from pipeline.config.topology import sequence_chunks
from pipeline.data.dataset import TokenDataset, UnknownIdError, choose_windows
from pipeline.data.documents import DocumentBoundaries
from pipeline.data.mixture import DataMixture
from pipeline.data.read_ahead import Index
from pipeline.data.sample_order import SampleLocation
from pipeline.data.skips import NO_SKIPS, Skips
from pipeline.data.span_cache import Part

IGNORE: Final = -100
"""Label of a position that is not a target."""

_COUNTED_STEPS: Final = 16
"""Steps whose targets are summed over the ranks at once, that many steps ahead."""
_LOCATED_ROWS: Final = 2048
_LOCATED_TOKENS: Final = 1 << 24
"""Rows and tokens that are located together and read ahead: some 32 MB."""
PARTS_IN_CACHE: Final = 4
"""Groups of steps of which all ranks of a host have room in the cache for object stores, at least."""


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch: the input of one forward pass on one rank. T = S / cp is the rank's part of a sequence of S tokens.

    Attributes:
        input_ids: int64 [B, T].
        labels: int64 [B, T]; labels[b, t] is the token that follows input_ids[b, t], or IGNORE.
        positions: int64 [B, T], position of every token in its document; None without a document mask, where positions
            in the sequence apply.
        documents: int32 [B, S], document mask: index of every token's document in the whole sequence; None as above.
        target_ids: int32 [B, T, k], ids for which a teacher's log-probabilities are given; None without cached logits.
        target_logs: fp16 [B, T, k + 1], these log-probabilities, last that of all other ids; None as above.
        sampled: bool [B, T], positions of samples whose targets the student has sampled; None without on-policy
            distillation.
    """

    input_ids: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    target_ids: Tensor | None = None
    target_logs: Tensor | None = None
    sampled: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """Copies the batch to a device; asynchronously from pinned memory."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return MicroBatch(*(moved(getattr(self, field.name)) for field in fields(self)))  # type: ignore[arg-type]

    def pin_memory(self) -> MicroBatch:
        """Copies the batch to page-locked memory."""
        pinned = (t if t is None else t.pin_memory() for t in (getattr(self, f.name) for f in fields(self)))
        return MicroBatch(*pinned)  # type: ignore[arg-type]

    def split(self, samples: int | Sequence[int]) -> list[MicroBatch]:
        """Splits into batches of `samples` samples each, or of as many as each number says, as views."""
        whole = [getattr(self, field.name) for field in fields(self)]
        sizes = samples if isinstance(samples, int) else list(samples)
        count = -(-self.input_ids.shape[0] // samples) if isinstance(samples, int) else len(samples)
        parts = [[None] * count if tensor is None else tensor.split(sizes) for tensor in whole]
        return [MicroBatch(*each) for each in zip(*parts, strict=True)]


class TeacherLogits(Protocol):
    """Cached logits of a teacher by sample; see `distillation.cached_logits`."""

    def read(self, location: SampleLocation) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """Ids int32 [n, S, k] and log-probabilities fp16 [n, S, k + 1] of samples."""
        ...


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of one optimizer step.

    Attributes:
        step: number of the step, from 1.
        micro_batches: in the order of gradient accumulation.
        targets: target tokens of the whole step, over all ranks and micro-batches; the same on every rank. At least 1:
            sums over targets are divided by it.
        has_targets: whether there are any. Without them (all masked) the step's loss is undefined.
    """

    step: int
    micro_batches: list[MicroBatch]
    targets: int
    has_targets: bool = True

    @classmethod
    def of(cls, step: int, micro_batches: list[MicroBatch], targets: int) -> StepBatch:
        """A batch with `targets` target tokens, 0 or more."""
        return cls(step, micro_batches, max(1, targets), has_targets=targets > 0)


TargetSum = Callable[[Tensor], Callable[[], Tensor]]
"""Begins to sum this rank's targets, int64 [steps], over the data-parallel ranks; the function it returns waits."""


@dataclass(frozen=True)
class _OwnTargets:
    """Targets of this rank's own samples, int64 [steps], of some steps that come next."""

    counts: Tensor


class StepLoader:
    """Iterates over the optimizer steps of a run, for one data-parallel rank.

    The samples of a step depend on the step alone; a rank takes its share of each. If they do not divide, every rank
    has rows for the largest share, and surplus rows are padding without targets. With uneven shares (`batch.shares`) a
    rank has its own samples and no padding. It can feed any PyTorch loop:
    `for step in StepLoader(...): for micro in step.micro_batches: ...`

    Args:
        mixture: the training samples.
        batch: global batch, micro-batch and gradient accumulation.
        dp_rank: coordinate of this rank on the data-parallel axis.
        steps: (first, last) step, counted from 1, both included.
        cp: context-parallel size: ranks that each hold an equal part of every sequence.
        cp_rank: coordinate of this rank on the context-parallel axis.
        zigzag: which part it is; see `topology.sequence_chunks`.
        mask_documents: document mask: positions restart in each document, and a token that is followed by another
            document's is no target.
        skips: skipped data.
        logits: a teacher's cached logits, which become part of the micro-batches.
        target_sum: where a step's targets are not known by its size (document mask, loss mask, packing,
            fill-in-the-middle), sums those of all ranks; every rank iterates then. When None each rank counts those of
            the whole step, for which it opens the files of all samples.
        prefetch: steps prepared ahead.
        pin: copy tensors to page-locked memory, for a GPU.
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
        logits: TeacherLogits | None = None,
        target_sum: TargetSum | None = None,
        prefetch: int = 4,
        pin: bool = False,
    ) -> None:
        self._mixture, self._batch, self._dp_rank, self._pin = mixture, batch, dp_rank, pin
        self._first, self._last = steps
        self._chunks = partial(sequence_chunks, cp=cp, cp_rank=cp_rank, zigzag=zigzag)
        self._mask_documents, self._prefetch = mask_documents, prefetch
        self._skips, self._logits = skips, logits
        self._samples_of_rows = samples_of_rows(batch, dp_rank)
        self._bounded = mask_documents or mixture.packed or mixture.fim is not None
        # masks in object stores are cached with the step that reads them, and not counted before it
        here = batch.part is None and not (mixture.masked and mixture.remote.fingerprints)
        self._target_sum = target_sum if here and (self._bounded or mixture.masked) else None

    def __len__(self) -> int:
        return max(0, self._last - self._first + 1)

    def __iter__(self) -> Iterator[StepBatch]:
        remote = self._mixture.remote.ahead
        if remote is not None:
            remote.begin(self._remote_parts(remote.order), step=self._first)
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
        """This rank's part of a step, computed in the calling thread; it counts the targets of the whole step."""
        targets = self._count(np.arange(self._batch.samples) + self._first_sample(step))
        return self._gather(step, self._mixture.order.locate(self._rows(step)), targets)

    def _gather(self, step: int, location: SampleLocation, targets: int) -> StepBatch:
        batch, last, samples = self._batch, self._batch.samples - 1, self._rows(step)
        fim = self._mixture.fim
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
            _apply_loss_mask(whole, self._mixture.loss_mask(location), chunks)
        whole.labels[torch.from_numpy(self._samples_of_rows > last)] = IGNORE
        if self._logits is not None:
            read = (torch.from_numpy(np.ascontiguousarray(_cut(each, chunks))) for each in self._logits.read(location))
            whole = replace(whole, **dict(zip(("target_ids", "target_logs"), read, strict=True)))
        sizes = batch.micro if batch.shares is None else batch.shares.sizes[self._dp_rank]
        return StepBatch.of(step, [self._own(micro) for micro in whole.split(sizes)], targets)

    def _count(self, samples: npt.NDArray[np.int64]) -> int:
        """Targets among some samples, global numbers. Of boundaries the indices are read, of masks a byte a token."""
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

    def _counted(self, step: int) -> npt.NDArray[np.int64]:
        """The samples of a step whose targets this rank counts: those of its rows, or all."""
        rows = self._samples_of_rows
        own = np.arange(self._batch.samples) if self._target_sum is None else rows[rows < self._batch.samples]
        return np.asarray(self._first_sample(step) + own, dtype=np.int64)

    def _own_targets(self, first: int) -> _OwnTargets:
        steps = range(first, min(first + _COUNTED_STEPS, self._last + 1))
        return _OwnTargets(torch.tensor([self._count(self._counted(step)) for step in steps], dtype=torch.int64))

    def _first_sample(self, step: int) -> int:
        return self._skips.samples(step, per_step=self._batch.samples)[0]

    def _rows(self, step: int) -> npt.NDArray[np.int64]:
        """Global sample numbers of this rank's rows of a step; padding rows repeat the last sample."""
        rows = np.minimum(self._samples_of_rows, self._batch.samples - 1)
        return np.asarray(self._first_sample(step) + rows, dtype=np.int64)

    def _located_steps(self) -> Iterator[tuple[int, SampleLocation]]:
        """Every step with the locations of its rows, computed for many steps together, which is cheaper.

        Readahead of the next group is requested while the current one is used, so that a slow file system reads
        concurrently and in advance. With loss masks it covers those of the samples whose targets are counted here.
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
        """Steps that are located and read ahead together.

        Those that are cached together do not depend on the first step, but for the first ones, so that a run that
        resumes finds them: they begin at multiples of their number, a power of two.
        """
        most = min(_LOCATED_ROWS, _LOCATED_TOKENS // self._batch.sequence_length)
        per_step = self._batch.samples if self._counts_all_masks else self._samples_of_rows.size
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
        return self._mixture.order.locate(np.concatenate([self._rows(step) for step in steps]))

    def _locate_counted(self, steps: range, wanted: bool) -> SampleLocation | None:
        if not wanted:
            return None
        return self._mixture.order.locate(np.concatenate([self._counted(step) for step in steps]))

    def _remote_parts(self, order: str) -> Iterator[Part | Index]:
        """What is read of object stores in all steps, in order."""
        mixture, known = self._mixture, set[str]()
        for steps in self._groups():
            bounded = self._locate_counted(steps, self._mask_documents or mixture.fim is not None)
            for prefix in [] if bounded is None else mixture.remote_shards(bounded):
                if prefix not in known:
                    known.add(prefix)
                    yield mixture.remote.index(prefix)
            for spans in mixture.remote_parts(self._locate(steps), self._locate_counted(steps, mixture.masked)):
                if spans:
                    yield Part(order, steps.start, tuple(spans))

    @property
    def _counts_all_masks(self) -> bool:
        return self._mixture.masked and self._target_sum is None

    def _own(self, micro: MicroBatch) -> MicroBatch:
        """Contiguous and, for a GPU, in page-locked memory: a strided view would be copied once more."""
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
        """Steps and, in front of the first of every `_COUNTED_STEPS`, the own targets of those after them."""
        try:
            for step, location in self._located_steps():
                targets = 0
                if self._target_sum is None:
                    targets = self._count(self._counted(step))
                elif (step - self._first) % _COUNTED_STEPS == 0:
                    nexts = [step + _COUNTED_STEPS] if step > self._first else [step, step + _COUNTED_STEPS]
                    yield from (self._own_targets(first) for first in nexts if first <= self._last)
                yield self._gather(step, location, targets)
        except GeneratorExit:
            raise
        except BaseException as error:  # raised by the consuming thread
            yield error


def step_bytes_of(batch: BatchSizes, *, masked: bool) -> int:
    """Bytes that all ranks read of an object store in a step, at most: ids of 4 bytes, and loss masks."""
    return batch.samples * (batch.sequence_length + 1) * (5 if masked else 4)


def largest_power_of_two(limit: int) -> int:
    """The largest power of two that is at most a number; 1 for numbers below."""
    return 1 << max(0, limit.bit_length() - 1)


def _lowest_bit(number: int) -> int:
    return number & -number


def samples_of_rows(batch: BatchSizes, dp_rank: int) -> npt.NDArray[np.int64]:
    """Index in the step of each row of a rank, over its micro-batches; from `batch.samples` on, rows are padding."""
    if batch.shares is not None:
        return np.asarray(batch.shares.samples(dp_rank), dtype=np.int64)
    starts = dp_rank * batch.micro + np.arange(batch.accumulation) * batch.dp * batch.micro
    rows: npt.NDArray[np.int64] = (starts[:, None] + np.arange(batch.micro)).ravel()
    if batch.part is None:
        return rows
    samples = np.concatenate([np.arange(first, end) for first, end in batch.part])
    return np.where(rows < samples.size, samples[np.minimum(rows, samples.size - 1)], batch.samples)


def most_on_a_rank(batch: BatchSizes, samples: npt.NDArray[np.int64]) -> int:
    """How many of some samples of a step the rank has that has most of them."""
    return int(np.bincount(samples // batch.micro % batch.dp, minlength=1).max())


def _by_step(steps: range, location: SampleLocation) -> Iterator[tuple[int, SampleLocation]]:
    sources, windows = (np.split(column, len(steps)) for column in (location.source, location.window))
    for step, source, window in zip(steps, sources, windows, strict=True):
        yield step, SampleLocation(source, window)


def make_batch(
    rows: npt.NDArray[Any],
    boundaries: DocumentBoundaries | None,
    *,
    mask_documents: bool = True,
    chunks: Sequence[range] | None = None,
) -> MicroBatch:
    """One rank's context-parallel part of samples, with labels, positions and document mask.

    Args:
        rows: [n, S + 1], of any integer dtype.
        boundaries: document boundaries and padding of the first rows; None if every sample is one document.
        mask_documents: apply the document mask; without it, only padding is masked.
        chunks: the rank's positions, of `topology.sequence_chunks`; all when None.
    """
    samples, length = rows.shape[0], rows.shape[1] - 1
    chunks = chunks or (range(length),)
    ids, labels = (_int64(_cut(each, chunks)) for each in (rows[:, :-1], rows[:, 1:]))
    if boundaries is None:
        return MicroBatch(torch.from_numpy(ids), torch.from_numpy(labels))
    for chunk, part in zip(chunks, np.split(labels, len(chunks), axis=1), strict=True):
        _mask_non_targets(part, boundaries, chunk, length=length, mask_documents=mask_documents)
    if not mask_documents:
        return MicroBatch(torch.from_numpy(ids), torch.from_numpy(labels))
    sample, begun = boundaries.parts(samples, length=length)
    sizes = np.diff(sample * length + begun, append=samples * length)
    positions = np.tile(np.arange(length), samples) - np.repeat(begun, sizes)
    numbers = np.arange(sample.size) - np.searchsorted(sample, sample)
    documents = np.repeat(numbers.astype(np.int32), sizes).reshape(samples, length)
    own_positions = np.ascontiguousarray(_cut(positions.reshape(samples, length), chunks))
    return MicroBatch(*map(torch.from_numpy, (ids, labels, own_positions, documents)))


def _mask_non_targets(
    labels: npt.NDArray[np.int64],
    boundaries: DocumentBoundaries,
    chunk: range,
    *,
    length: int,
    mask_documents: bool,
) -> None:
    """Masks labels of padding and, with a document mask, those that cross a boundary; they are of one chunk."""
    if boundaries.used is not None:
        for row in np.flatnonzero(boundaries.used <= length).tolist():
            labels[row, max(0, int(boundaries.used[row]) - 1 - chunk.start) :] = IGNORE
    if mask_documents:
        before = boundaries.at - 1 - chunk.start  # the label that crosses a boundary
        own = (before >= 0) & (before < len(chunk))
        labels[boundaries.sample[own], before[own]] = IGNORE


def _cut(whole: npt.NDArray[Any], chunks: Sequence[range]) -> npt.NDArray[Any]:
    """The columns of the chunks; a view of `whole` if there is one chunk."""
    parts = [whole[:, chunk.start : chunk.stop] for chunk in chunks]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _apply_loss_mask(batch: MicroBatch, loss_mask: npt.NDArray[np.bool_], chunks: Sequence[range]) -> None:
    """Masks the labels of a rank's part; `loss_mask` is bool [n, S + 1], of whole samples."""
    batch.labels[torch.from_numpy(~_cut(loss_mask[:, 1:], chunks))] = IGNORE


def _int64(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return array.astype(np.int64, order="C")  # always a copy: inputs and labels of a sample overlap


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
        dp, dp_rank, cp, cp_rank, zigzag, mask_documents: as `StepLoader`.
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
            _apply_loss_mask(batch, dataset.loss_mask(windows), chunks)
        batch.labels[torch.from_numpy(mine >= chosen.size)] = IGNORE
        yield batch
