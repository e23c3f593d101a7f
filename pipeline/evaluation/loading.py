"""A finished model in memory, whole: a key that is missing or left over is an error, not a table of warnings.

transformers 5 fills a missing tensor with random values and goes on (issues 43257, 45313, 45397 of its repository).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig
from transformers.utils import logging

from headrace.base.errors import DataError
from pipeline.evaluation.model_folder import ModelFolder


def pick_device() -> torch.device:
    """The first CUDA device where there is one, else the CPU; `CUDA_VISIBLE_DEVICES` chooses another, or none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(path: Path, *, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu") -> Any:
    """A causal language model in evaluation mode, dense: quantized weights are unpacked while loading.

    Args:
        path: a Hugging Face folder, quantized or not.
        dtype: of floating-point parameters; "auto" for the folder's own.
        device: where to put it.

    Raises:
        DataError: the folder is no model, transformers refuses it, or its tensors are not the architecture's.
    """
    logging.disable_progress_bar()  # its bars would interleave with ours
    how: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if ModelFolder.open(path).quantized_by == "compressed-tensors":
        # unpacked now and not at the first forward pass, which gives the same bits, but leaves a wrapper on every
        # layer that costs more than a small layer itself
        how["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    try:
        with warnings.catch_warnings():
            # it says of every such load that the file's settings win, which is what is wanted
            warnings.filterwarnings("ignore", message="You passed `quantization_config`")
            model, info = AutoModelForCausalLM.from_pretrained(path, **how)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise DataError(f"{path} cannot be loaded: {error}\n  try: export the model again") from error
    _refuse_strays(path, info)
    return model.to(device).eval()


def empty_model(path: Path) -> Any:
    """The folder's architecture on the meta device: modules and shapes, no memory, no weights.

    Raises:
        DataError: transformers does not know the architecture.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be loaded: {error}\n  try: export the model again") from error


def _refuse_strays(path: Path, info: dict[str, Any]) -> None:
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            names = sorted(str(name) for name in info[what])
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            word = what.removesuffix("_keys")
            raise DataError(f"{path} does not fit its architecture: {word} {shown}\n  try: export the model again")
