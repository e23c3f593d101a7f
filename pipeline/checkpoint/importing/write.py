"""Writes tensors that are read one by one as a checkpoint of a run: in the memory of the largest of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from pipeline.checkpoint.checkpoint import Checkpoint, CheckpointInfo
from pipeline.checkpoint.format.metadata import METADATA
from pipeline.checkpoint.format.shard_table import State
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.importing.source import SourceTensor
from pipeline.checkpoint.store import CheckpointStore
from pipeline.checkpoint.write.locations import MetadataWriter
from pipeline.checkpoint.write.plan import make_write_plan
from pipeline.checkpoint.write.write_shards import write_metadata, write_shards
from pipeline.models.build.rectangle import Rectangle

_SHARD_BYTES = 64 << 20
"""A rank that needs a part of a shard reads all of it."""


def write_tensors(
    store: CheckpointStore,
    info: CheckpointInfo,
    tensors: Mapping[str, SourceTensor],
    others: Mapping[str, Tensor],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Checkpoint:
    """Writes and commits a checkpoint. In one process.

    Args:
        store: of the run.
        info: goes into the manifest.
        tensors: key -> tensor; written in fp32, buffers in their dtype.
        others: key -> small tensors, such as the step counter.
        progress: called with (bytes written, all bytes).

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError, RuntimeError: a file cannot be written.
    """
    state: dict[str, NamedShard | Tensor] = {key: _in_rows(key, tensor) for key, tensor in tensors.items()}
    staging = store.create_staging(info.step)
    try:
        sha256 = _write(state | dict(others), _Reader(tensors, others, progress), staging)
        return store.commit(info, sha256)
    except BaseException:
        store.discard_staging(info.step)
        raise


def _write(state: State, read: _Reader, staging: Path) -> dict[str, str]:
    """Writes the shards and the metadata; the checksums of the files."""
    plan = make_write_plan(state)
    written = write_shards(plan, read, staging)
    assert plan.division is not None
    assert written.locations is not None
    metadata = MetadataWriter(plan.division)
    metadata.update({plan.rank: written.locations})
    return {**written.sha256, METADATA: write_metadata(metadata.encoded(), staging)}


class _Reader:
    """Returns the values of a shard; of a tensor in several shards, which follow each other, it is read once."""

    def __init__(
        self,
        tensors: Mapping[str, SourceTensor],
        others: Mapping[str, Tensor],
        progress: Callable[[int, int], None],
    ) -> None:
        self._tensors, self._others, self._progress = tensors, others, progress
        self._key, self._value = "", torch.empty(0)
        self._done, self._total = 0, sum(4 * torch.Size(each.shape).numel() for each in tensors.values())

    def __call__(self, item: WriteItem) -> Tensor:
        key = item.index.fqn
        if key in self._others:
            return self._others[key]
        if key != self._key:
            # the one before is freed first: two large ones might not fit
            self._value = torch.empty(0)
            self._key, self._value = key, self._tensors[key].read().to(written_dtype(key, self._tensors[key]))
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        value = self._value[Rectangle(tuple(chunk.offsets), tuple(chunk.sizes)).slices]
        self._done += 4 * value.numel()
        self._progress(self._done, self._total)
        return value


def written_dtype(key: str, tensor: SourceTensor) -> torch.dtype:
    """The dtype of a tensor in a checkpoint."""
    return tensor.dtype if key.startswith("buffer/") else torch.float32


def _in_rows(key: str, tensor: SourceTensor) -> NamedShard:
    """The shards of a tensor, without values: some of its rows each."""
    dtype, shape = written_dtype(key, tensor), tensor.shape
    whole = torch.empty(shape, dtype=dtype, device="meta")
    made = NamedShard(shape, start=0, values=whole.view(-1))
    if len(shape) and whole.nbytes > _SHARD_BYTES:
        rows = max(1, shape[0] * _SHARD_BYTES // whole.nbytes)
        starts = range(0, shape[0], rows)
        made.parts = {(at, *(0,) * (len(shape) - 1)): whole[at : at + rows] for at in starts}
    return made
