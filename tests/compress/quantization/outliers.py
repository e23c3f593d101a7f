"""A model with outlier channels that computes what it computed before: hard to round, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CHANNELS, FACTOR = 6, 30.0
"""Of every norm in a decoder layer."""
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def make_outliers(source: Path, folder: Path, *, activations: bool) -> Path:
    """Copies a Llama; 6 channels per norm are 30 times as large in the activations, or in the weights that read them.

    With `activations` norm weights times 30 and the columns that read them divided by 30 (int8 activations suffer), or
    else norm weights divided and columns times 30 (groups of weights with one scale suffer).
    """
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    factor = FACTOR if activations else 1 / FACTOR
    generator = torch.Generator().manual_seed(0)
    for name in sorted(tensors):
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm not in _READERS:
            continue
        channels = torch.randperm(tensors[name].numel(), generator=generator)[:CHANNELS]
        tensors[name][channels] *= factor
        for reader in _READERS[norm]:
            tensors[f"{layer}.{reader}.weight"][:, channels] /= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
