"""Names and files that people give where a model folder belongs: a name of the Hugging Face Hub, a file of weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FOLDER = "the Hugging Face folder with its config.json"
_PICKLE = (
    "a pickle of PyTorch, which can execute code and is not opened",
    'a folder of safetensors: python -c "from transformers import AutoModelForCausalLM as M;'
    " M.from_pretrained('{folder}').save_pretrained('OUT')\", and OUT as model.path",
)
_FILES = {
    ".gguf": ("a GGUF file, weights for llama.cpp", "the Hugging Face folder that it was converted from"),
    ".safetensors": ("one file of weights, without the config", ""),
    ".json": ("a file, and the model is its folder", ""),
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), _PICKLE),
}
"""Suffix of a file -> the file in words, and what to give; the folder of the file where that is empty."""


def weight_file_problem(path: str) -> tuple[str, str] | None:
    """Returns reason and remedy for the path of a file of weights; None for any other path. Reads no file."""
    suffix = Path(path).suffix.lower()
    if suffix not in _FILES:
        return None
    what, instead = _FILES[suffix]
    folder = Path(path).parent
    named = instead.format(folder=folder) or (str(folder) if str(folder) != "." else _FOLDER)
    return f"it is {what}", f"use {named}"


def no_folder_problem(path: str, otherwise: str) -> tuple[str, str]:
    """Returns reason and remedy for a path that is not a folder.

    Args:
        path: the path, as the user typed it.
        otherwise: remedy where it is neither a file of weights nor like a name of the Hub.
    """
    if (found := weight_file_problem(path)) is not None:
        return found
    if _HUB_NAME.fullmatch(path):
        return "no such directory; it looks like a name of the Hugging Face Hub", f"use hf://{path}{_or_copy(path)}"
    return "no such directory", otherwise


def offline_remedy(name: str) -> str:
    """Returns how to get a model of the Hub without a network: its copy in the Hub's cache, or a download elsewhere."""
    copy = hub_copy(name)
    if copy is not None:
        return f"use {copy}, its copy in the cache of huggingface_hub"
    place = name.rpartition("/")[2]
    return f"where there is a network: hf download {name} --local-dir {place}; copy the folder here, and use {place}"


def hub_copy(name: str) -> Path | None:
    """Returns the folder of a model in the cache of huggingface_hub on this host; None if it is not there."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{name.replace('/', '--')}"
    found = sorted((cache / "snapshots").glob("*/config.json"), key=lambda file: file.lstat().st_mtime)
    return found[-1].parent if found else None


def _or_copy(name: str) -> str:
    copy = hub_copy(name)
    return "" if copy is None else f", or without a network {copy}, its copy in the cache of huggingface_hub"
