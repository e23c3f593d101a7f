"""What a checkpoint holds, from its metadata alone: names, shapes, and where the pieces of every tensor lie.

The metadata is a pickle that torch.distributed.checkpoint wrote: it is read like code, from whom one trusts.
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

_UNREADABLE = (
    OSError,
    EOFError,
    pickle.UnpicklingError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
)
"""What reading a pickle raises that is none, or not one of torch's."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        key: as in `named_state`, e.g. weight/model.norm.weight.
        shape: of the full tensor.
        dtype: of its elements.
        pieces: the boxes it was written in.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Rectangle, ...]

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of the full tensor."""
        return self.numel * self.dtype.itemsize


def read_metadata(directory: Path) -> Metadata:
    """What torch.distributed.checkpoint noted about a directory.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return dcp.FileSystemReader(directory).read_metadata()
    except _UNREADABLE as error:
        raise CheckpointError(f"{directory} has no readable metadata: {error}") from None


def contents(metadata: Metadata) -> list[StoredTensor]:
    """The tensors of a checkpoint, in the order they were written in."""
    entries: Mapping[str, Any] = metadata.state_dict_metadata
    return [_stored(key, entry) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]


def _stored(key: str, entry: TensorStorageMetadata) -> StoredTensor:
    pieces = tuple(Rectangle(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
    return StoredTensor(key, tuple(entry.size), entry.properties.dtype, pieces)


def misfit(stored: StoredTensor) -> str | None:
    """What keeps the pieces from covering a tensor exactly once, in words; None when they do.

    Inside the tensor, no two of them overlapping, and as many elements as it has: then none is left out.
    """
    for piece in stored.pieces:
        ends = (o + s for o, s in zip(piece.offsets, piece.sizes, strict=True))
        if len(piece.sizes) != len(stored.shape) or any(end > d for end, d in zip(ends, stored.shape, strict=True)):
            return f"a piece at {piece.offsets} of size {piece.sizes} does not lie within {stored.shape}"
    pair = next(_overlapping(stored.pieces), None)
    if pair is not None:
        return f"the pieces at {pair[0].offsets} and at {pair[1].offsets} overlap"
    missing = stored.numel - sum(piece.numel for piece in stored.pieces)
    return f"{missing:,} of {stored.numel:,} elements are in no piece" if missing else None


def _overlapping(pieces: Sequence[Rectangle]) -> Iterator[tuple[Rectangle, Rectangle]]:
    """Pairs of boxes that share an element, found by going along the first dim."""
    full = [piece for piece in pieces if piece.numel]
    if full and not full[0].sizes:  # of a scalar, every piece is all of it
        yield from pairwise(full)
        return
    begun: list[Rectangle] = []
    for piece in sorted(full, key=lambda each: each.offsets):
        begun = [other for other in begun if other.offsets[0] + other.sizes[0] > piece.offsets[0]]
        yield from ((other, piece) for other in begun if _meet(other, piece))
        begun.append(piece)


def _meet(a: Rectangle, b: Rectangle) -> bool:
    dims = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(start < other + size and other < start + length for start, length, other, size in dims)


def misplaced(metadata: Metadata, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Pieces that are not where the metadata says they are: (key, what is wrong).

    Args:
        metadata: of the checkpoint.
        sizes: file name -> bytes.
    """
    storage: Mapping[Any, Any] = metadata.storage_data
    known = {(index.fqn, tuple(index.offset or ())) for index in storage}
    for stored in contents(metadata):
        lost = [piece.offsets for piece in stored.pieces if (stored.key, piece.offsets) not in known]
        yield from ((stored.key, f"it is not said where its piece at {offsets} lies") for offsets in lost)
    taken: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in storage.items():
        taken.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length, index.fqn))
    for file, places in taken.items():
        places.sort()
        if file not in sizes or places[-1][1] > sizes[file]:
            yield places[-1][2], f"it lies past the end of {file}" if file in sizes else f"it is in {file}, not listed"
        both = ((one, other) for one, other in pairwise(places) if other[0] < one[1])
        yield from ((other[2], f"it shares bytes of {file} with {one[2]}") for one, other in both)
