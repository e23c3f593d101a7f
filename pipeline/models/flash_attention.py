"""FlashAttention by transformers' own integration: the package and the GPU that a version needs.

transformers takes the installed package of a version, else the kernel that the package `kernels` finds in the Hub's
cache or fetches from the Hub. Neither is on by default: a run uses `models.attention` otherwise.
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
"""Compute capabilities with kernels of a version: 3 is written for Hopper and runs on Ampere, 4 is for Hopper and
Blackwell. The oldest are those of transformers' compatibility table."""


def install_remedy(attention: str) -> str | None:
    """The remedy where transformers cannot load a version of FlashAttention; None for other attention."""
    if attention not in _PACKAGES:
        return None
    package = _PACKAGES[attention]
    return (
        f"pip install {package}, or pip install kernels (it fetches the kernel from the Hugging Face Hub; on nodes"
        " without a network fetch it before, into HF_HOME), or use sdpa"
    )


def check_flash_attention(attention: str, device: torch.device) -> None:
    """Refuses a version of FlashAttention on a device that has no kernel of it, before a process group exists.

    Raises:
        ConfigError: names the device and a version that it has.
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
    """The reason why a GPU has no kernel of a version; None where it has one."""
    oldest, newest = _OLDEST[attention], _NEWEST_MAJOR.get(attention)
    if found >= oldest and (newest is None or found[0] <= newest):
        return None
    wanted = f"{oldest[0]}.{oldest[1]}" + (" or later" if newest is None else f" to {newest}.x")
    return f"{name} has compute capability {found[0]}.{found[1]}, and {attention} needs {wanted}"
