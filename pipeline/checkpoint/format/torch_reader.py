"""Lets stock torch.distributed.checkpoint read a checkpoint: the files are torch's, the metadata is made on demand.

    dcp.load(state, storage_reader=TorchReader(directory))

`torch.distributed.checkpoint.format_utils.dcp_to_torch_save` needs torch's own `.metadata`, which headrace does not
write. `save_for_torch` (`headrace checkpoint torch`) makes the same file as that function.

Torch's metadata consists of Python objects, about a kilobyte of memory per shard; headrace itself does not use it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from foundation.directory import whole_file
from pipeline.checkpoint.format.metadata import read_metadata
from pipeline.checkpoint.format.shard_table import CheckpointMetadata


class TorchReader(dcp.FileSystemReader):
    """Torch's reader of checkpoint files.

    Args:
        directory: directory of the checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory

    def read_metadata(self, *_args: Any, **_named: Any) -> Metadata:
        """Reads the metadata in the form of torch.distributed.checkpoint.

        Raises:
            CheckpointError: the metadata cannot be read.
        """
        metadata = to_torch_metadata(read_metadata(self._directory))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def save_for_torch(directory: Path, out: Path) -> int:
    """Writes every tensor of a checkpoint with `torch.save`, as a dict with the checkpoint's names.

    Args:
        directory: directory of the checkpoint.
        out: file to write, which is complete or absent afterwards.

    Returns:
        Number of tensors.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    reader = TorchReader(directory)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    state: dict[str, Any] = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in tensors.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    with whole_file(out) as partial:
        torch.save(state, partial)
    return len(state)


def to_torch_metadata(metadata: CheckpointMetadata) -> Metadata:
    """Converts metadata to the Python objects of torch.distributed.checkpoint."""
    entries: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for number, stored in enumerate(metadata.tensors):
        rectangles = metadata.table.rectangles(number)
        chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in rectangles]
        entries[stored.key] = TensorStorageMetadata(
            TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks
        )
        for row, chunk in zip(metadata.table.rows(number), chunks, strict=True):
            if metadata.file[row] >= 0:
                name, begin = metadata.files[metadata.file[row]], int(metadata.position[row])
                places[MetadataIndex(stored.key, chunk.offsets)] = _StorageInfo(name, begin, int(metadata.length[row]))
    return Metadata(entries, storage_data=places)  # type: ignore[arg-type]
