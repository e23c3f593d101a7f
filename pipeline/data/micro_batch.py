"""Tensors that one rank trains on in a step: inputs, labels, positions, document mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.data.documents import DocumentBoundaries

IGNORE: Final = -100
"""Label of a position that is not a target."""


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch: the input of one forward pass on one rank. T = S / cp is the rank's part of a sequence of S tokens.

    Attributes:
        input_ids: int64 [B, T].
        labels: int64 [B, T]; labels[b, t] is the token that follows input_ids[b, t], or IGNORE.
        positions: int64 [B, T], position of every token in its document; None without a document mask, where positions
            in the sequence apply.
        documents: int32 [B, S], document mask: index of every token's document in the whole sequence; None without one.
        target_ids: int32 [B, T, k], ids for which a teacher's log-probabilities are given; None without cached logits.
        target_logs: fp16 [B, T, k + 1], log-probabilities of `target_ids`, last that of all other ids; or None.
        sampled: bool [B, T], true in samples whose targets the student has sampled; None without on-policy
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
        """Copies the batch to a device, asynchronously if it is in pinned memory."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return MicroBatch(*(moved(getattr(self, field.name)) for field in fields(self)))  # type: ignore[arg-type]

    def pin_memory(self) -> MicroBatch:
        """Copies the batch to page-locked memory."""
        pinned = (t if t is None else t.pin_memory() for t in (getattr(self, f.name) for f in fields(self)))
        return MicroBatch(*pinned)  # type: ignore[arg-type]

    def split(self, samples: int | Sequence[int]) -> list[MicroBatch]:
        """Splits the batch into views of `samples` samples each, or of as many samples as each number in a list."""
        whole = [getattr(self, field.name) for field in fields(self)]
        sizes = samples if isinstance(samples, int) else list(samples)
        count = -(-self.input_ids.shape[0] // samples) if isinstance(samples, int) else len(samples)
        parts = [[None] * count if tensor is None else tensor.split(sizes) for tensor in whole]
        return [MicroBatch(*each) for each in zip(*parts, strict=True)]


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of one optimizer step.

    Attributes:
        step: number of the step, from 1.
        micro_batches: the rank's micro-batches, in the order of gradient accumulation.
        targets: target tokens of the whole step, over all ranks and micro-batches; the same on every rank. At least 1:
            sums over targets are divided by it.
        has_targets: whether the step has targets. If all are masked, its loss is undefined.
    """

    step: int
    micro_batches: list[MicroBatch]
    targets: int
    has_targets: bool = True

    @classmethod
    def of(cls, step: int, micro_batches: list[MicroBatch], targets: int) -> StepBatch:
        """Makes a batch with `targets` target tokens, 0 or more."""
        return cls(step, micro_batches, max(1, targets), has_targets=targets > 0)


def make_batch(
    rows: npt.NDArray[Any],
    boundaries: DocumentBoundaries | None,
    *,
    mask_documents: bool = True,
    chunks: Sequence[range] | None = None,
) -> MicroBatch:
    """Makes one rank's context-parallel part of samples, with labels, positions and document mask.

    Args:
        rows: [n, S + 1], of any integer dtype.
        boundaries: document boundaries and padding of the first rows; None if every sample is one document.
        mask_documents: whether to apply the document mask; without it, only padding is masked.
        chunks: the rank's positions, from `topology.sequence_chunks`; all when None.
    """
    samples, length = rows.shape[0], rows.shape[1] - 1
    chunks = chunks or (range(length),)
    ids, labels = (_int64(cut(each, chunks)) for each in (rows[:, :-1], rows[:, 1:]))
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
    own_positions = np.ascontiguousarray(cut(positions.reshape(samples, length), chunks))
    return MicroBatch(*map(torch.from_numpy, (ids, labels, own_positions, documents)))


def _mask_non_targets(
    labels: npt.NDArray[np.int64],
    boundaries: DocumentBoundaries,
    chunk: range,
    *,
    length: int,
    mask_documents: bool,
) -> None:
    """Masks one chunk's labels: padding and, with a document mask, labels that cross a boundary."""
    if boundaries.used is not None:
        for row in np.flatnonzero(boundaries.used <= length).tolist():
            labels[row, max(0, int(boundaries.used[row]) - 1 - chunk.start) :] = IGNORE
    if mask_documents:
        before = boundaries.at - 1 - chunk.start  # the label that crosses a boundary
        own = (before >= 0) & (before < len(chunk))
        labels[boundaries.sample[own], before[own]] = IGNORE


def cut(whole: npt.NDArray[Any], chunks: Sequence[range]) -> npt.NDArray[Any]:
    """Returns the columns of the chunks; a view of `whole` if there is one chunk."""
    parts = [whole[:, chunk.start : chunk.stop] for chunk in chunks]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def apply_loss_mask(batch: MicroBatch, loss_mask: npt.NDArray[np.bool_], chunks: Sequence[range]) -> None:
    """Masks the labels of a rank's part; `loss_mask` is bool [n, S + 1] and covers whole samples."""
    batch.labels[torch.from_numpy(~cut(loss_mask[:, 1:], chunks))] = IGNORE


def _int64(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return array.astype(np.int64, order="C")  # always a copy: inputs and labels of a sample overlap
