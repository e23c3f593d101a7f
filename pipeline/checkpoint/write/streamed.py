"""Writes tensors that are read one by one, or in parts, in one process, with memory for the largest of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from pipeline.checkpoint.format.shard_table import CheckpointMetadata
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.write.locations import MetadataWriter
from pipeline.checkpoint.write.plan import make_write_plan
from pipeline.checkpoint.write.write_shards import write_shards
from pipeline.models.construction.rectangle import Rectangle

Progress = Callable[[int, int], None]
"""Callback that takes (bytes written, total bytes)."""
_SHARD_BYTES = 64 << 20
"""Largest shard in bytes: a rank that needs a part of a shard may read all of it."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read on demand.

    Attributes:
        shape: shape of the whole tensor.
        dtype: dtype of the tensor that `read` returns.
        read: function that returns the tensor.
        part: function that returns a rectangle of the tensor, if it can be made in parts; None if it cannot.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    part: Callable[[Rectangle], Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """Returns the tensor converted to another dtype when it is read."""
        return self if dtype == self.dtype else LazyTensor(self.shape, dtype, lambda: self.read().to(dtype))


def write_streamed(
    tensors: Mapping[str, LazyTensor], directory: Path, progress: Progress = lambda _done, _total: None
) -> tuple[CheckpointMetadata, dict[str, str]]:
    """Writes tensors into a file of torch.distributed.checkpoint, without metadata.

    Args:
        tensors: key -> tensor.
        directory: existing directory.
        progress: called as tensors are written.

    Returns:
        Metadata with the locations, and file name -> SHA-256.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError, RuntimeError: the file cannot be written.
    """
    plan = make_write_plan({key: _in_rows(tensor) for key, tensor in tensors.items()})
    written = write_shards(plan, _Reader(tensors, progress), directory)
    assert plan.division is not None
    assert written.locations is not None
    metadata = MetadataWriter(plan.division)
    metadata.update({plan.rank: written.locations})
    return metadata.metadata(), written.sha256


class _Reader:
    """Reader of shards' values; a tensor with several consecutive shards is read once."""

    def __init__(self, tensors: Mapping[str, LazyTensor], progress: Progress) -> None:
        self._tensors, self._progress = tensors, progress
        self._key, self._value = "", torch.empty(0)
        self._done, self._total = 0, sum(each.nbytes for each in tensors.values())

    def __call__(self, item: WriteItem) -> Tensor:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        value = self._part(item.index.fqn, Rectangle(tuple(chunk.offsets), tuple(chunk.sizes)))
        self._done += value.nbytes
        self._progress(self._done, self._total)
        return value

    def _part(self, key: str, rectangle: Rectangle) -> Tensor:
        part = self._tensors[key].part
        if part is not None:
            return part(rectangle)
        if key != self._key:
            self._value = torch.empty(0)  # the previous tensor is freed first: two large ones might not fit
            self._key, self._value = key, self._tensors[key].read()
        return self._value[rectangle.slices]


def _in_rows(tensor: LazyTensor) -> NamedShard:
    """Divides a tensor into shards of some rows each, without values."""
    shape = tensor.shape
    whole = torch.empty(shape, dtype=tensor.dtype, device="meta")
    made = NamedShard(shape, start=0, values=whole.view(-1))
    if shape and whole.nbytes > _SHARD_BYTES:
        rows = max(1, shape[0] * _SHARD_BYTES // whole.nbytes)
        starts = range(0, shape[0], rows)
        made.parts = {(at, *(0,) * (len(shape) - 1)): whole[at : at + rows] for at in starts}
    return made
