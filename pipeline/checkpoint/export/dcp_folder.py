"""Writes a checkpoint, optimizer included, as a folder of torch.distributed.checkpoint with Hugging Face names.

    {"model": {NAME: weight}, "optimizer": {"state": {NAME: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [...]},
     "step": N}

This is the layout of torch's `get_model_state_dict` and `get_optimizer_state_dict`, for `dcp.load` on any ranks.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

from pipeline.checkpoint.export.trained_state import TrainedState
from pipeline.checkpoint.format.metadata import TORCH_METADATA
from pipeline.checkpoint.format.torch_reader import to_torch_metadata
from pipeline.checkpoint.write.streamed import LazyTensor, Progress, write_streamed

_PLAIN = "__1_0.distcp"
"""Name of the file with all values that are not tensors."""
Path_ = tuple[str | int, ...]


def write_dcp(state: TrainedState, directory: Path, progress: Progress) -> None:
    """Writes the folder.

    Args:
        state: the state to write.
        directory: existing empty directory.
        progress: called as tensors are written.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError, RuntimeError: a file cannot be written.
    """
    tensors = dict(_tensors(state))
    found, _sha256 = write_streamed({_key(path): tensor for path, tensor in tensors.items()}, directory, progress)
    metadata = to_torch_metadata(found)
    plain = dict(_plain(state))
    _write_plain(plain, metadata, directory / _PLAIN)
    metadata.planner_data = {_key(path): path for path in (*tensors, *plain)}
    metadata.storage_meta = StorageMeta()
    with (directory / TORCH_METADATA).open("wb") as file:
        pickle.dump(metadata, file)


def _tensors(state: TrainedState) -> Iterator[tuple[Path_, LazyTensor]]:
    step = state.optimizer_step()
    for name in state.names:
        yield ("model", name), state.weight(name)
    for alias, name in state.aliases():
        yield ("model", alias), state.weight(name)
    for name, buffer in state.buffers().items():
        yield ("model", name), buffer
    for name in state.names:
        yield ("optimizer", "state", name, "step"), LazyTensor((), torch.float32, lambda: step)
        for kind in ("exp_avg", "exp_avg_sq"):
            yield ("optimizer", "state", name, kind), state.moment(kind, name)


def _plain(state: TrainedState) -> Iterator[tuple[Path_, Any]]:
    for number, group in enumerate(state.groups()):
        for key, value in group.items():
            yield ("optimizer", "param_groups", number, key), value
    yield ("step",), state.step


def _write_plain(plain: dict[Path_, Any], metadata: Metadata, path: Path) -> None:
    """Writes each value that is not a tensor with torch.save, and adds its location to the metadata."""
    with path.open("wb") as file:
        for at, value in plain.items():
            buffer = io.BytesIO()
            torch.save(value, buffer)
            metadata.state_dict_metadata[_key(at)] = BytesStorageMetadata()
            place = _StorageInfo(path.name, file.tell(), buffer.getbuffer().nbytes)
            metadata.storage_data[MetadataIndex(_key(at))] = place
            file.write(buffer.getbuffer())


def _key(path: Path_) -> str:
    return ".".join(map(str, path))
