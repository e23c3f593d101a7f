"""The values of a teacher whose weights are stored quantized: dequantized on the host, and then handed on one by one.

Only weights may be quantized: if a teacher's layers also round their inputs, that rounding would be lost and change the
logits.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from foundation.errors import ConfigError
from foundation.remote_folder import local_folder
from pipeline.models.construction.buffers import persistent_buffers
from pipeline.models.construction.counter import CPU
from pipeline.models.construction.rectangle import Rectangle, part
from pipeline.models.folder.loading import load_model
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.routers import has_experts


def is_dequantized(folder: ModelFolder) -> bool:
    """Tells whether a folder's weights are to be dequantized for a teacher.

    Raises:
        ConfigError: the model's layers round their inputs, or it is a mixture of experts.
    """
    if folder.quantized_by != "compressed-tensors":
        return False
    if has_experts(folder.config):
        why = "its experts are quantized one by one, and a teacher's are in one tensor for each layer"
        remedy = "use the model that it was quantized from"
        raise ConfigError("distill.teacher", str(folder.path), why=why, remedy=remedy)
    if folder.quantizes_activations:
        why = "its layers round their inputs, too, and a teacher is computed in floating point"
        remedy = "the model that it was quantized from, or a scheme of weights alone (W4A16, W8A16)"
        raise ConfigError("distill.teacher", str(folder.path), why=why, remedy=f"use {remedy}")
    return True


class DequantizedValues:
    """Values of a folder in compressed-tensors; a `models.construction.initial_values.ParameterValues`.

    The whole model is in host memory, in the dtype of the folder, from the first value to the last.

    Args:
        folder: a Hugging Face folder with only its weights quantized.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = local_folder(folder)
        self._left: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] | None = None

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        """Implements `ParameterValues.value`; each value can be read once, and is then freed."""
        if name not in self._left:
            self._load()
        return part(self._left.pop(name), box).to(device).to(torch.float32)

    def buffer(self, name: str) -> Tensor | None:
        """Implements `ParameterValues.buffer`."""
        if self._buffers is None:
            self._load()
        assert self._buffers is not None
        return self._buffers.get(name)

    def _load(self) -> None:
        model = load_model(self._folder)
        self._left = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._buffers = persistent_buffers(model)
