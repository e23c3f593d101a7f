"""The micro-batches of a ranked task's forward passes: each row is a request's context and continuation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.evaluation.tasks.encode import EncodedTask
from pipeline.evaluation.tasks.passes import ForwardPass

Chunks = Callable[[int], Sequence[range]]


@dataclass(frozen=True)
class RequestBatch(MicroBatch):
    """A micro-batch of requests, padded on the right: causal attention does not see the padding.

    Attributes:
        requests: number of the request that each position belongs to, int64 [B, T].
    """

    requests: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """Moves the batch to a device (`MicroBatch.to`)."""
        moved = (getattr(self, field.name) for field in fields(self))
        return RequestBatch(*(each if each is None else each.to(device, non_blocking=True) for each in moved))  # type: ignore[arg-type]


def request_batches(
    task: EncodedTask,
    passes: Sequence[ForwardPass],
    *,
    dp_rank: int = 0,
    chunks: Chunks = lambda length: [range(length)],
) -> Iterator[RequestBatch]:
    """Yields one data-parallel rank's batch of every pass.

    Args:
        task: the requests.
        passes: passes that `passes.forward_passes` returns.
        dp_rank: data-parallel rank of this process.
        chunks: function that returns this rank's positions of a sequence, given its length
            (`topology.sequence_chunks`): all positions without context parallelism.
    """
    for each in passes:
        ids = np.zeros((each.rows, each.length), dtype=np.int64)
        labels, numbers = np.full_like(ids, IGNORE), np.zeros_like(ids)
        for row, number in enumerate(each.requests[dp_rank].tolist()):
            request, targets = task.ids[number], int(task.targets[number])
            end = len(request) - 1
            ids[row, :end], labels[row, end - targets : end] = request[:-1], request[-targets:]
            numbers[row] = number
        kept = np.concatenate([np.arange(part.start, part.stop) for part in chunks(each.length)])
        made = (ids[:, kept], labels[:, kept], np.tile(kept, (each.rows, 1)), numbers[:, kept])
        own_ids, own_labels, positions, own_numbers = map(torch.from_numpy, made)
        # a decoder's own positions are those of a full-length sequence; this pass may be shorter
        yield RequestBatch(own_ids, own_labels, positions, requests=own_numbers)
