"""FlashAttention through transformers' own integration: the package and the GPU that each version needs.

transformers uses a version's installed package, or else the kernel that the package `kernels` finds in the Hub's cache
or downloads. FlashAttention is off by default: a run uses `models.attention`.
"""

from __future__ import annotations

import torch

from foundation.errors import ConfigError

_PACKAGES = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}

_OLDEST = {"flash_attention_2": (8, 0), "flash_attention_3": (8, 0), "flash_attention_4": (9, 0)}
_NEWEST_MAJOR = {"flash_attention_3": 9}
"""Compute capabilities with kernels of each version: version 3 is written for Hopper and runs on Ampere, version 4 is
for Hopper and Blackwell. The lower limits are from transformers' compatibility table."""


def install_remedy(attention: str) -> str | None:
    """Returns the remedy if transformers cannot load a version of FlashAttention; None for other attention."""
    if attention not in _PACKAGES:
        return None
    package = _PACKAGES[attention]
    return (
        f"pip install {package}, or pip install kernels (it fetches the kernel from the Hugging Face Hub; on nodes"
        " without a network fetch it before, into HF_HOME), or use sdpa"
    )


def check_flash_attention(attention: str, device: torch.device) -> None:
    """Refuses a version of FlashAttention that has no kernel for the device, before a process group exists.

    Raises:
        ConfigError: there is no kernel; names the device and a version that has one.
    """
    if attention not in _PACKAGES:
        return
    if device.type != "cuda":
        why = "this machine has no GPU, and FlashAttention's kernels are written for GPUs"
        raise ConfigError("model.attn_implementation", attention, why=why, remedy="use sdpa")
    unfitting = unfit(attention, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    if unfitting is not None:
        raise ConfigError("model.attn_implementation", attention, why=unfitting, remedy="use sdpa")


def unfit(attention: str, found: tuple[int, int], name: str) -> str | None:
    """Explains why a version has no kernel for a GPU; None if it has one."""
    oldest, newest = _OLDEST[attention], _NEWEST_MAJOR.get(attention)
    if found >= oldest and (newest is None or found[0] <= newest):
        return None
    wanted = f"{oldest[0]}.{oldest[1]}" + (" or later" if newest is None else f" to {newest}.x")
    return f"{name} has compute capability {found[0]}.{found[1]}, and {attention} needs {wanted}"
