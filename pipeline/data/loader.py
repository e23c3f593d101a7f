"""Batches, gathered in process by one thread that runs ahead.

Worker processes were measured to be 10-50 times slower than gathering in process: copying a batch between processes
costs more than reading it from a memory map.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.config.batch import BatchSizes
from pipeline.data.dataset import TokenDataset, choose_windows
from pipeline.data.documents import Borders
from pipeline.data.mixture import DataMixture
from pipeline.data.order import SampleLocation
from pipeline.data.skips import NO_SKIPS, Skips

IGNORE: Final = -100
"""The label of a position that is not a target."""

_PLACED_ROWS: Final = 2048
_PLACED_TOKENS: Final = 1 << 24
"""Rows and tokens for which places are found together, and which the system is told of: some 32 MB ahead."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass of one rank sees. T is the rank's part of a sequence of S tokens: S divided by cp.

    Attributes:
        input_ids: int64 [B, T].
        labels: int64 [B, T]; labels[b, t] is the token that follows input_ids[b, t], or IGNORE.
        positions: int64 [B, T], place of every token in its document; None when the sequence is one document, and the
            place in the sequence counts.
        documents: int32 [B, S], number of the document of every token of the whole sequence; None as above.
    """

    input_ids: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on a device; copies from pinned memory do not block."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return MicroBatch(*(moved(getattr(self, field.name)) for field in fields(self)))  # type: ignore[arg-type]

    def pin_memory(self) -> MicroBatch:
        """The same batch in page-locked memory."""
        pinned = (t if t is None else t.pin_memory() for t in (getattr(self, f.name) for f in fields(self)))
        return MicroBatch(*pinned)  # type: ignore[arg-type]

    def split(self, samples: int) -> list[MicroBatch]:
        """Batches of so many samples each, as views."""
        whole = [getattr(self, field.name) for field in fields(self)]
        count = -(-self.input_ids.shape[0] // samples)
        parts = [[None] * count if tensor is None else tensor.split(samples) for tensor in whole]
        return [MicroBatch(*each) for each in zip(*parts, strict=True)]


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of one optimizer step.

    Attributes:
        step: number of the step, from 1.
        micro_batches: in the order they are accumulated.
        targets: target tokens of the whole step, over all ranks and micro-batches. Every rank knows it.
    """

    step: int
    micro_batches: list[MicroBatch]
    targets: int


class StepLoader:
    """An iterable over the steps of a run, as one data-parallel rank sees them.

    Which samples are in a step depends on the step alone; a rank takes its share of each. Where they cannot be dealt
    out evenly, every rank has rows for the largest share, and those left over are filling: without targets. It can feed
    any PyTorch loop: `for step in StepLoader(...): for micro in step.micro_batches: ...`

    Args:
        blend: where samples come from.
        batch: how a step is cut up.
        dp_rank: this rank's place on the data-parallel axis.
        steps: (first, last) step, counted from 1, both included.
        cp: ranks that share every sequence, in contiguous pieces of equal length.
        cp_rank: this rank's place among them.
        mask_documents: documents of one sample are kept apart: positions start anew in each, and a token that is
            followed by another document's is no target.
        skips: which data is passed over.
        prefetch: steps gathered ahead.
        pin: put tensors in page-locked memory, for a GPU.
    """

    def __init__(  # noqa: PLR0913  a rank's place is four of them, and all but two have defaults
        self,
        blend: DataMixture,
        batch: BatchSizes,
        *,
        dp_rank: int,
        steps: tuple[int, int],
        cp: int = 1,
        cp_rank: int = 0,
        mask_documents: bool = False,
        skips: Skips = NO_SKIPS,
        prefetch: int = 4,
        pin: bool = False,
    ) -> None:
        self._blend, self._batch, self._dp_rank, self._pin = blend, batch, dp_rank, pin
        self._first, self._last = steps
        self._cp, self._cp_rank = cp, cp_rank
        self._mask_documents, self._prefetch = mask_documents, prefetch
        self._skips = skips
        starts = dp_rank * batch.micro + np.arange(batch.accumulation) * batch.dp * batch.micro
        # of each row of this rank its place in the step; from `batch.samples` on it is filling
        self._samples_of_rows = (starts[:, None] + np.arange(batch.micro)).ravel()

    def __len__(self) -> int:
        return max(0, self._last - self._first + 1)

    def __iter__(self) -> Iterator[StepBatch]:
        ready: queue.Queue[StepBatch | BaseException] = queue.Queue(self._prefetch)
        stop = threading.Event()
        thread = threading.Thread(target=self._gather_all, args=(ready, stop), name="loader", daemon=True)
        thread.start()
        try:
            for _ in range(len(self)):
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()

    def gather(self, step: int) -> StepBatch:
        """This rank's part of a step, at once and in this thread."""
        return self._gather(step, self._blend.order.place(self._rows(step)))

    def _gather(self, step: int, place: SampleLocation) -> StepBatch:
        batch, real = self._batch, self._samples_of_rows < self._batch.samples
        rows, fim = self._blend.rows(place), self._blend.fim
        targets, own = batch.tokens, None
        if self._mask_documents or self._blend.packed or fim is not None:
            samples = np.arange(batch.samples) + self._first_sample(step)
            before = borders = self._blend.borders(samples)
            if fim is not None:
                borders, mine = fim.borders(before, samples), self._samples_of_rows[real]
                rows[: mine.size] = fim.rows(rows[: mine.size], before.of(mine), samples[mine])
            targets -= borders.without_target(length=batch.sequence_length, masked=self._mask_documents)
            own = borders.of(self._samples_of_rows[real])
        whole = make_batch(rows, own, mask_documents=self._mask_documents, cp=self._cp, cp_rank=self._cp_rank)
        if self._blend.masked:
            targets = self._leave_out(whole, place, step)
        whole.labels[torch.from_numpy(~real)] = IGNORE
        return StepBatch(step, [self._own(micro) for micro in whole.split(batch.micro)], targets)

    def _leave_out(self, batch: MicroBatch, place: SampleLocation, step: int) -> int:
        """Takes the labels away that are not learnt; returns the targets of the whole step.

        To know these, every rank reads the masks of all samples: a byte per token.
        """
        _keep_learnt(batch, self._blend.learnt(place), cp_rank=self._cp_rank)
        samples = np.arange(self._batch.samples) + self._first_sample(step)
        learnt = self._blend.learnt(self._blend.order.place(samples))[:, 1:]
        if self._mask_documents or self._blend.packed:
            self._blend.borders(samples).take_targets(learnt, masked=self._mask_documents)
        return max(1, int(learnt.sum()))  # a step in which nothing is learnt has a loss of 0

    def _first_sample(self, step: int) -> int:
        return self._skips.samples(step, per_step=self._batch.samples)[0]

    def _rows(self, step: int) -> npt.NDArray[np.int64]:
        """Global samples of this rank's rows of a step; those of filling are the last again."""
        rows = np.minimum(self._samples_of_rows, self._batch.samples - 1)
        return np.asarray(self._first_sample(step) + rows, dtype=np.int64)

    def _placed(self) -> Iterator[tuple[int, SampleLocation]]:
        """Every step with the places of its rows, found for many steps together, which is cheaper.

        The system is told of them in time, so that a slow file system reads them all at once and before they are
        waited for. Where there are masks, that means those of all samples of a step, which every rank reads.
        """
        most = min(_PLACED_ROWS, _PLACED_TOKENS // self._batch.sequence_length)
        told_of = self._batch.samples if self._blend.masked else self._samples_of_rows.size
        together = max(1, most // told_of)
        ahead: tuple[range, SampleLocation] | None = None
        for first in range(self._first, self._last + 1, together):
            steps = range(first, min(first + together, self._last + 1))
            place = self._blend.order.place(np.concatenate([self._rows(step) for step in steps]))
            self._blend.hint(place)
            self._hint_masks(steps)
            if ahead is not None:
                yield from _by_step(*ahead)
            ahead = steps, place
        if ahead is not None:
            yield from _by_step(*ahead)

    def _hint_masks(self, steps: range) -> None:
        if self._blend.masked:
            samples = [self._first_sample(step) + np.arange(self._batch.samples) for step in steps]
            place = self._blend.order.place(np.concatenate(samples))
            for number in np.unique(place.source):
                self._blend.sources[number].hint_masks(place.window[place.source == number])

    def _own(self, micro: MicroBatch) -> MicroBatch:
        """Contiguous, in page-locked memory for a GPU: a strided view would be copied again on its way."""
        return micro.pin_memory() if self._pin else micro

    def _gather_all(self, ready: queue.Queue[StepBatch | BaseException], stop: threading.Event) -> None:
        for item in self._items():
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if stop.is_set():
                return

    def _items(self) -> Iterator[StepBatch | BaseException]:
        try:
            for step, place in self._placed():
                yield self._gather(step, place)
        except GeneratorExit:
            raise
        except BaseException as error:  # handed to the loop, which raises it
            yield error


def _by_step(steps: range, place: SampleLocation) -> Iterator[tuple[int, SampleLocation]]:
    sources, windows = (np.split(column, len(steps)) for column in (place.source, place.window))
    for step, source, window in zip(steps, sources, windows, strict=True):
        yield step, SampleLocation(source, window)


def make_batch(
    rows: npt.NDArray[Any], borders: Borders | None, *, mask_documents: bool = True, cp: int = 1, cp_rank: int = 0
) -> MicroBatch:
    """One rank's piece of whole samples.

    Args:
        rows: [n, S + 1], of any type of integers.
        borders: where documents begin and padding, of the first of the rows; None when a sample counts as one document.
        mask_documents: keep documents apart; without it, only padding is left out.
        cp: ranks that share a sequence.
        cp_rank: this rank's place among them.
    """
    samples, length = rows.shape[0], rows.shape[1] - 1
    assert length % cp == 0, (length, cp)
    piece = slice(cp_rank * (length // cp), (cp_rank + 1) * (length // cp))
    ids, labels = _int64(rows[:, :-1][:, piece]), _int64(rows[:, 1:][:, piece])
    if borders is None:
        return MicroBatch(torch.from_numpy(ids), torch.from_numpy(labels))
    if borders.used is not None:
        for row in np.flatnonzero(borders.used <= length).tolist():
            labels[row, max(0, int(borders.used[row]) - 1 - piece.start) :] = IGNORE
    if not mask_documents:
        return MicroBatch(torch.from_numpy(ids), torch.from_numpy(labels))
    before = borders.at - 1 - piece.start  # of a border, the label that crosses it
    own = (before >= 0) & (before < ids.shape[1])
    labels[borders.sample[own], before[own]] = IGNORE
    sample, begun = borders.parts(samples, length=length)
    sizes = np.diff(sample * length + begun, append=samples * length)
    positions = np.tile(np.arange(length), samples) - np.repeat(begun, sizes)
    numbers = np.arange(sample.size) - np.searchsorted(sample, sample)
    documents = np.repeat(numbers.astype(np.int32), sizes).reshape(samples, length)
    own_positions = np.ascontiguousarray(positions.reshape(samples, length)[:, piece])
    return MicroBatch(*map(torch.from_numpy, (ids, labels, own_positions, documents)))


def _keep_learnt(batch: MicroBatch, learnt: npt.NDArray[np.bool_], *, cp_rank: int) -> None:
    """Takes the labels of a rank's piece away that are not learnt; `learnt` is bool [n, S + 1], of whole samples."""
    width = batch.labels.shape[1]
    batch.labels[torch.from_numpy(~learnt[:, 1 + cp_rank * width : 1 + (cp_rank + 1) * width])] = IGNORE


def _int64(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return array.astype(np.int64, order="C")  # a copy in any case: inputs and labels of one sample overlap


def heldout_batches(
    dataset: TokenDataset,
    *,
    batch_size: int,
    dp: int,
    dp_rank: int,
    cp: int = 1,
    cp_rank: int = 0,
    mask_documents: bool = False,
    samples: int | None = None,
) -> Iterator[MicroBatch]:
    """The windows of a split in its order, as one rank sees them.

    Every rank gets the same number of batches of the same shape (sharded engines must run in step): rows past the end
    are filled with labels that do not count.

    Args:
        dataset: the split.
        batch_size: samples per batch of a rank.
        dp, dp_rank, cp, cp_rank, mask_documents: as `StepLoader`.
        samples: evaluate so many windows, spread evenly over the split; all when None.
    """
    chosen = choose_windows(dataset.windows, samples)
    for start in range(0, chosen.size, batch_size * dp):
        mine = start + dp_rank * batch_size + np.arange(batch_size)
        windows = chosen[np.minimum(mine, chosen.size - 1)]
        borders = dataset.borders(windows) if mask_documents else None
        batch = make_batch(dataset.rows(windows), borders, cp=cp, cp_rank=cp_rank)
        if dataset.masked:
            _keep_learnt(batch, dataset.learnt(windows), cp_rank=cp_rank)
        batch.labels[torch.from_numpy(mine >= chosen.size)] = IGNORE
        yield batch
