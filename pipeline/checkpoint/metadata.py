"""Contents of a checkpoint, from its metadata alone: names, shapes, and the shards of every tensor and where they lie.

The metadata is a pickle written by torch.distributed.checkpoint: like code, read it only from a source you trust.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from headrace.base.errors import CheckpointError
from pipeline.checkpoint.shards import Rectangle

_UNPICKLING_ERRORS = (
    OSError,
    EOFError,
    pickle.UnpicklingError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
)
"""What reading a damaged pickle raises, or one that is not torch's."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        key: as in `named_state`, e.g. weight/model.norm.weight.
        shape: of the full tensor.
        dtype: of its elements.
        shards: the rectangles it was written in.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Rectangle, ...]

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the full tensor."""
        return self.numel * self.dtype.itemsize


def read_metadata(directory: Path) -> Metadata:
    """The metadata that torch.distributed.checkpoint has written into a directory.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return dcp.FileSystemReader(directory).read_metadata()
    except _UNPICKLING_ERRORS as error:
        raise CheckpointError(f"{directory} has no readable metadata: {error}") from None


def stored_tensors(metadata: Metadata) -> list[StoredTensor]:
    """The tensors of a checkpoint, in the order in which they were written."""
    entries: Mapping[str, Any] = metadata.state_dict_metadata
    return [_stored(key, entry) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]


def _stored(key: str, entry: TensorStorageMetadata) -> StoredTensor:
    shards = tuple(Rectangle(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
    return StoredTensor(key, tuple(entry.size), entry.properties.dtype, shards)


def coverage_error(stored: StoredTensor) -> str | None:
    """Why the shards do not cover the tensor exactly once; None when they do.

    If all shards lie inside the tensor, no two overlap, and they have as many elements as it has, none is missing.
    """
    for shard in stored.shards:
        ends = (o + s for o, s in zip(shard.offsets, shard.sizes, strict=True))
        if len(shard.sizes) != len(stored.shape) or any(end > d for end, d in zip(ends, stored.shape, strict=True)):
            return f"a shard at {shard.offsets} of size {shard.sizes} does not lie within {stored.shape}"
    pair = next(_overlapping(stored.shards), None)
    if pair is not None:
        return f"the shards at {pair[0].offsets} and at {pair[1].offsets} overlap"
    missing = stored.numel - sum(shard.numel for shard in stored.shards)
    return f"{missing:,} of {stored.numel:,} elements are in no shard" if missing else None


def _overlapping(shards: Sequence[Rectangle]) -> Iterator[tuple[Rectangle, Rectangle]]:
    """Pairs of rectangles that share an element, found by a sweep along the first dim."""
    filled = [shard for shard in shards if shard.numel]
    if filled and not filled[0].sizes:  # of a scalar, every shard is all of it
        yield from pairwise(filled)
        return
    active: list[Rectangle] = []
    for shard in sorted(filled, key=lambda each: each.offsets):
        active = [other for other in active if other.offsets[0] + other.sizes[0] > shard.offsets[0]]
        yield from ((other, shard) for other in active if _intersect(other, shard))
        active.append(shard)


def _intersect(a: Rectangle, b: Rectangle) -> bool:
    dims = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(start < other + size and other < start + length for start, length, other, size in dims)


def storage_errors(metadata: Metadata, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Shards that do not lie where the metadata says: (key, what is wrong).

    Args:
        metadata: of the checkpoint.
        sizes: file name -> bytes.
    """
    storage: Mapping[Any, Any] = metadata.storage_data
    located = {(index.fqn, tuple(index.offset or ())) for index in storage}
    for stored in stored_tensors(metadata):
        missing = [shard.offsets for shard in stored.shards if (stored.key, shard.offsets) not in located]
        yield from ((stored.key, f"the metadata does not say where its shard at {offsets} lies") for offsets in missing)
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in storage.items():
        by_file.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length, index.fqn))
    for file, ranges in by_file.items():
        ranges.sort()
        if file not in sizes:
            yield ranges[-1][2], f"it is in {file}, which the manifest does not list"
        elif ranges[-1][1] > sizes[file]:
            yield ranges[-1][2], f"it lies past the end of {file}"
        overlapping = ((one, other) for one, other in pairwise(ranges) if other[0] < one[1])
        yield from ((other[2], f"it shares bytes of {file} with {one[2]}") for one, other in overlapping)
