"""Writes model.gguf from a Hugging Face folder, tensor by tensor; reads it back and compares it.

At most one tensor, or one projection of a layer's experts, is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from safetensors import safe_open

from foundation.errors import DataError
from pipeline.models.folder.weight_files import stored_tensors
from pipeline.models.gguf import architectures, libllama
from pipeline.models.gguf.architectures import Array
from pipeline.models.gguf.header import open_writer
from pipeline.models.gguf.plan import GgufPlan, GgufTensor
from pipeline.models.gguf.types import BY_GGUF, ROUNDING, UNWEIGHTED

FILE = "model.gguf"
Progress = Callable[[int, int], None]
Importance = Mapping[str, Array]


def write(
    plan: GgufPlan,
    folder: Path,
    *,
    importance: Importance | None = None,
    progress: Progress = lambda _done, _all: None,
) -> None:
    """Writes `model.gguf` into a folder.

    Args:
        plan: plan from `plan_file`.
        folder: existing folder to write into.
        importance: name in the Hugging Face folder -> weight of each input's squared error, float32 [inputs]; None, or
            a missing name, means equal weights.
        progress: function called with (tensors written, total tensors).
    """
    writer = open_writer(plan, folder / FILE)
    weights = Weights(plan.source.path)
    for number, tensor in enumerate(plan.tensors):
        weighed = [(importance or {}).get(name) for name in tensor.sources]
        writer.write_tensor_data(encoded(_values(tensor, weights, plan), tensor.type, weighed))
        progress(number + 1, len(plan.tensors))
    writer.close()


def check(plan: GgufPlan, folder: Path, *, progress: Progress = lambda _done, _all: None) -> None:
    """Reads `model.gguf` back and compares every tensor with the original's.

    Args:
        plan: plan with which the file was written.
        folder: folder with the file.
        progress: function called with (tensors compared, all tensors).

    Raises:
        DataError: a tensor is missing, or differs by more than the rounding of its type.
    """
    stored = {tensor.name: tensor for tensor in GGUFReader(folder / FILE).tensors}
    weights = Weights(plan.source.path)
    for number, tensor in enumerate(plan.tensors):
        if tensor.name not in stored:
            raise DataError(f"{FILE} has no tensor {tensor.name}, which was written\n  try: run it again")
        found = dequantize(stored[tensor.name].data, tensor.type).reshape(tensor.shape)
        expected = _values(tensor, weights, plan)
        error, size = np.sqrt(np.mean(np.square(found - expected))), np.sqrt(np.mean(np.square(expected)))
        if not error <= ROUNDING[tensor.type] * size:
            raise DataError(
                f"{tensor.name} of {FILE} differs from the original by {error / max(size, 1e-30):.2g} of its root mean"
                f" square, and {tensor.type.name} rounds by at most {ROUNDING[tensor.type]:g}\n  try: another scheme"
            )
        progress(number + 1, len(plan.tensors))


def _values(tensor: GgufTensor, weights: Weights, plan: GgufPlan) -> Array:
    """Reads the values of a tensor, fp32, in the file's shape."""
    config, kind = plan.source.config, plan.architecture
    values = [architectures.stored_value(name, weights.read(name), config, kind) for name in tensor.sources]
    return np.stack(values) if len(tensor.shape) == 3 else values[0]


def encoded(value: Array, kind: GGMLQuantizationType, importance: Sequence[Array | None] = ()) -> Any:
    """Converts a tensor to a ggml type: float32 or float16 of its shape, or the bytes of its rows, uint8 [..., bytes].

    Args:
        value: fp32 [O, I], or [E, O, I] for experts.
        kind: ggml type.
        importance: weights [I] of squared errors, for the matrix or for each expert's matrix; None for equal weights.
    """
    weighed = [None if kind in UNWEIGHTED else each for each in importance]
    if kind in BY_GGUF and not any(each is not None for each in weighed):
        made = quantize(np.ascontiguousarray(value), kind)
        return np.ascontiguousarray(made)
    parts = value if value.ndim == 3 else value.reshape(1, -1, value.shape[-1])
    weighed = weighed or [None] * len(parts)
    rows = [
        libllama.quantize_rows(part, ggml_type=int(kind), importance=each)
        for part, each in zip(parts, weighed, strict=True)
    ]
    return np.concatenate(rows).reshape(*value.shape[:-1], -1)


class Weights:
    """The tensors of a folder's safetensors files.

    Args:
        folder: a Hugging Face folder.
    """

    def __init__(self, folder: Path) -> None:
        self._files = {name: info.file for name, info in stored_tensors(folder).items()}

    def read(self, name: str) -> Array:
        """Returns one tensor, fp32."""
        with safe_open(self._files[name], framework="pt") as opened:
            value: Array = opened.get_tensor(name).to(torch.float32).numpy()
            return value
