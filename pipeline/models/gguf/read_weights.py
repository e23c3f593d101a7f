"""Reads the tensors of a Hugging Face folder one by one, in fp32."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from pipeline.models.folder.weight_files import stored_tensors
from pipeline.models.gguf.architectures import Array


class Weights:
    """The tensors of a folder's safetensors files.

    Args:
        folder: a Hugging Face folder.
    """

    def __init__(self, folder: Path) -> None:
        self._files = {name: info.file for name, info in stored_tensors(folder).items()}

    def read(self, name: str) -> Array:
        """One tensor, fp32."""
        with safe_open(self._files[name], framework="pt") as opened:
            value: Array = opened.get_tensor(name).to(torch.float32).numpy()
            return value
