"""Reads the weights of a checkpoint one tensor at a time, without a process group."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from headrace.base.errors import CheckpointError
from pipeline.checkpoint.metadata import read_metadata, stored_tensors
from pipeline.checkpoint.named_state import weight_key


class CheckpointWeights:
    """Parameter values read from a checkpoint's shards. Its metadata is read once.

    Args:
        directory: of the checkpoint.

    Attributes:
        shapes: parameter name -> full shape.

    Raises:
        CheckpointError: the metadata cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        metadata, prefix = read_metadata(directory), weight_key("")
        self._directory = directory
        self._reader = _Reader(directory, metadata)
        weights = (each for each in stored_tensors(metadata) if each.key.startswith(prefix))
        self.shapes = {each.key.removeprefix(prefix): torch.Size(each.shape) for each in weights}

    def value(self, name: str) -> Tensor:
        """The parameter's full fp32 value on the CPU.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        value = torch.empty(self.shapes[name], dtype=torch.float32)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load({weight_key(name): value}, storage_reader=self._reader, no_dist=True)
        except (CheckpointException, RuntimeError, ValueError, OSError) as error:
            lines = str(error).strip().splitlines() or [repr(error)]
            raise CheckpointError(
                f"{self._directory}: {name} cannot be read: {lines[-1]}\n  try: headrace checkpoint verify"
            ) from None
        return value


class _Reader(dcp.FileSystemReader):
    """Torch's reader with cached metadata, which it would read again for every one of thousands of tensors."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_named: Any) -> Metadata:
        return self._metadata
