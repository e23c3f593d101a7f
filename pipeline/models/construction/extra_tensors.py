"""Finds and reads the tensors of a model folder that the model does not use; see `folder/extra_weights.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from foundation.foreign_json import read_json
from pipeline.models.folder.extra_weights import extra_names
from pipeline.models.folder.weight_files import HfFields, TensorInfo

SCALE = "_scale_inv"
"""Suffix of the tensor with one scale per block, beside a weight in 8-bit floating point (DeepSeek-V3)."""

COMPUTED = re.compile(r"inv_freq$|\.attn\.(masked_)?bias$")
"""Rotary tables and masks that old files contain; models compute them."""


def extra_of(model: nn.Module, names: Iterable[str], config: HfFields) -> list[str]:
    """Returns the names of stored tensors that the model does not use and may lack.

    These are layers that predict more tokens, by the folder's config, and what transformers ignores for the model's
    architecture, without the tables that models compute.

    Args:
        model: the Hugging Face model, on any device.
        names: names of stored tensors.
        config: the folder's parsed config.json.
    """
    every, own = list(names), model.state_dict().keys()
    known = extra_names(config, every)
    return [n for n in every if n not in own and (n in known or is_ignored(model, n)) and not COMPUTED.search(n)]


def is_ignored(model: nn.Module, name: str) -> bool:
    """Whether transformers ignores a tensor in files of this architecture."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def stored_extras(
    folder: Path, stored: Mapping[str, TensorInfo], names: Iterable[str], *, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Reads tensors one at a time, unchanged; weights in fp8 are multiplied by their scales.

    Args:
        folder: the model folder, whose config.json has the size of fp8 blocks.
        stored: name -> tensor of the folder's files.
        names: names of the tensors to read, without scales.
        dtype: dtype of weights that were stored in fp8.
    """
    block = block_size(folder)
    for name in names:
        value, scale = whole(stored[name]), stored.get(name + SCALE)
        yield name, value if scale is None else scaled(value, whole(scale), block).to(dtype)


def scaled(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiplies an fp8 weight [out, in] by its scales [ceil(out / block), ceil(in / block)]; returns fp32.

    Source: DeepSeek-V3's inference/kernel.py, `weight_dequant`.
    """
    rows, columns = weight.shape
    full = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * full


def whole(stored: TensorInfo) -> Tensor:
    """Reads a tensor from its file: as many rows as its shape says."""
    with safe_open(stored.file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(stored.name)
    return tensor[: stored.shape[0]] if stored.shape else tensor


def block_size(folder: Path) -> tuple[int, int]:
    """Rows and columns of a block with one scale; DeepSeek-V3's if config.json has none."""
    file = folder / "config.json"
    fields = read_json(file) if file.is_file() else {}
    rows, columns = (fields.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    return int(rows), int(columns)
