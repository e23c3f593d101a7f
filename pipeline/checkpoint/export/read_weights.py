"""Reads the weights of a checkpoint one tensor at a time, without a process group."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from foundation.errors import CheckpointError
from pipeline.checkpoint.format.metadata import read_metadata
from pipeline.checkpoint.named_state import buffer_key, moment_key, weight_key
from pipeline.checkpoint.read_shards import ShardReader
from pipeline.config.sections.optimizers import EMA
from pipeline.models.construction.counter import CPU
from pipeline.models.construction.rectangle import Rectangle, part


class CheckpointWeights:
    """Values of parameters and persistent buffers, read from a checkpoint's shards. The metadata is read once.

    Args:
        directory: directory of the checkpoint.
        ema: whether the values are the EMA of the weights.

    Attributes:
        shapes: parameter name -> full shape.
        buffers: persistent buffer's name -> its shape; empty for checkpoints of versions that stored no buffers.

    Raises:
        CheckpointError: the metadata cannot be read.
    """

    def __init__(self, directory: Path, *, ema: bool = False) -> None:
        metadata = read_metadata(directory)
        self._directory, self._prefix = directory, moment_key(EMA, "") if ema else weight_key("")
        self._reader = ShardReader(directory, metadata)
        stored = metadata.tensors
        self.shapes, self.buffers = (
            {each.key.removeprefix(prefix): torch.Size(each.shape) for each in stored if each.key.startswith(prefix)}
            for prefix in (self._prefix, buffer_key(""))
        )
        self._dtypes = {each.key: each.dtype for each in stored}

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        """Implements `ParameterValues.value`; the tensor is read whole.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        value = self._read(f"{self._prefix}{name}", torch.empty(self.shapes[name], dtype=torch.float32))
        return part(value, box).to(device)

    def buffer(self, name: str) -> Tensor | None:
        """Implements `ParameterValues.buffer`; the buffer keeps its own dtype.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        if name not in self.buffers:
            return None
        key = buffer_key(name)
        return self._read(key, torch.empty(self.buffers[name], dtype=self._dtypes[key]))

    def _read(self, key: str, value: Tensor) -> Tensor:
        try:
            self._reader.read({key: value})
        except (CheckpointError, RuntimeError, OSError) as error:
            lines = str(error).strip().splitlines() or [repr(error)]
            what = f"{key.partition('/')[2]} cannot be read: {lines[-1]}"
            raise CheckpointError(f"{self._directory}: {what}\n  try: headrace checkpoint verify") from None
        return value
