"""Batches, gathered in process by one thread that runs ahead.

Worker processes were measured to be 10-50 times slower than gathering in process: copying a batch between processes
costs more than reading it from a memory map.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pipeline.config.batch import Batch
from pipeline.data.blend import Blend
from pipeline.data.dataset import TokenDataset

IGNORE: Final = -100
"""The label of a position that is not a target."""


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


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of one optimizer step.

    Attributes:
        step: number of the step, from 1.
        micro_batches: in the order they are accumulated.
        targets: target tokens of the whole step, over all ranks and micro-batches.
    """

    step: int
    micro_batches: list[MicroBatch]
    targets: int


class StepLoader:
    """An iterable over the steps of a run, as one data-parallel rank sees them.

    Which samples are in a step depends on the step alone; a rank takes its share of each. It can feed any PyTorch
    loop: `for step in StepLoader(...): for micro in step.micro_batches: ...`

    Args:
        blend: where samples come from.
        batch: how a step is cut up.
        dp_rank: this rank's place on the data-parallel axis.
        steps: (first, last) step, counted from 1, both included.
        prefetch: steps gathered ahead.
        pin: put tensors in page-locked memory, for a GPU.
    """

    def __init__(
        self, blend: Blend, batch: Batch, *, dp_rank: int, steps: tuple[int, int], prefetch: int = 4, pin: bool = False
    ) -> None:
        self._blend, self._batch, self._dp_rank, self._pin = blend, batch, dp_rank, pin
        self._first, self._last = steps
        self._prefetch = prefetch

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
        batch = self._batch
        start = (step - 1) * batch.samples + self._dp_rank * batch.micro
        micro_starts = start + np.arange(batch.accumulation) * batch.dp * batch.micro
        samples = (micro_starts[:, None] + np.arange(batch.micro)).ravel()
        rows = torch.from_numpy(self._blend.read(samples))
        micros = [MicroBatch(self._own(part[:, :-1]), self._own(part[:, 1:])) for part in rows.split(batch.micro)]
        return StepBatch(step, micros, targets=batch.tokens)

    def _own(self, view: Tensor) -> Tensor:
        """A contiguous copy, in page-locked memory for a GPU: a strided view would be copied again on its way."""
        return view.contiguous().pin_memory() if self._pin else view.contiguous()

    def _gather_all(self, ready: queue.Queue[StepBatch | BaseException], stop: threading.Event) -> None:
        for step in range(self._first, self._last + 1):
            try:
                item: StepBatch | BaseException = self.gather(step)
            except BaseException as error:  # handed to the loop, which raises it
                item = error
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if stop.is_set() or isinstance(item, BaseException):
                return


def heldout_batches(
    dataset: TokenDataset, *, batch_size: int, dp: int, dp_rank: int, samples: int | None = None
) -> Iterator[MicroBatch]:
    """The windows of a split from first to last, as one data-parallel rank sees them.

    Every rank gets the same number of batches of the same shape (sharded engines must run in step): rows past the end
    are filled with labels that do not count.

    Args:
        samples: evaluate only the first so many windows; all when None.
    """
    total = min(samples or dataset.windows, dataset.windows)
    for start in range(0, total, batch_size * dp):
        mine = start + dp_rank * batch_size + np.arange(batch_size)
        rows = torch.from_numpy(dataset.read(np.minimum(mine, total - 1)))
        labels = rows[:, 1:].clone()
        labels[torch.from_numpy(mine >= total)] = IGNORE
        yield MicroBatch(rows[:, :-1], labels)
