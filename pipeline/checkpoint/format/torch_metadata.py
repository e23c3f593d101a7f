"""The metadata of torch.distributed.checkpoint, which earlier versions wrote, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from pipeline.checkpoint.format.shard_table import CheckpointMetadata, ShardTable, StoredTensor, most_dims, padded


def from_torch_metadata(metadata: Metadata) -> CheckpointMetadata:
    """Torch's metadata as arrays.

    Raises:
        AttributeError, TypeError, ValueError: it is not what torch.distributed.checkpoint writes.
    """
    entries = {k: e for k, e in metadata.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}
    tensors = tuple(StoredTensor(key, tuple(e.size), e.properties.dtype) for key, e in entries.items())
    storage: dict[Any, Any] = dict(metadata.storage_data)
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in storage.items()}
    names = {name: number for number, name in enumerate(sorted({info.relative_path for info in storage.values()}))}
    owner: list[int] = []
    shards: list[tuple[Any, Any]] = []
    locations: list[tuple[int, int, int]] = []
    for number, (key, entry) in enumerate(entries.items()):
        for chunk in entry.chunks:
            info = places.get((key, tuple(chunk.offsets)))
            owner.append(number)
            shards.append((chunk.offsets, chunk.sizes))
            locations.append((names[info.relative_path], info.offset, info.length) if info else (-1, 0, 0))
    dims = max([most_dims(tensors), *(len(offsets) for offsets, _ in shards)])
    offsets, sizes = (padded([s[n] for s in shards], dims=dims, fill=n) for n in (0, 1))
    table = ShardTable(tensors, np.array(owner, dtype=np.int64), offsets, sizes)
    file, position, length = np.array(locations, dtype=np.int64).reshape(-1, 3).T
    return CheckpointMetadata(table, tuple(names), file, position, length)
