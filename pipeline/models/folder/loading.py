"""Loads a Hugging Face model strictly: missing or unexpected tensors are an error, not a warning.

transformers 5 fills missing tensors with random values and continues (issues 43257, 45313, 45397 of its repository).
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, GenerationConfig
from transformers.utils import logging

from foundation.errors import DataError
from foundation.gpu_drivers import refuse_unusable_gpu
from pipeline.models.construction.extra_tensors import extra_of
from pipeline.models.folder.beside_weights import GENERATION
from pipeline.models.folder.extra_weights import extra_line, extra_names
from pipeline.models.folder.model_folder import ModelFolder, read_config, scheme_groups
from pipeline.models.folder.text_part import only_decoder_loads
from pipeline.models.routers import has_experts


def pick_device() -> torch.device:
    """Returns the first CUDA device, or the CPU without one; `CUDA_VISIBLE_DEVICES` selects another, or none.

    Raises:
        ConfigError: this host seems to have a GPU, and torch cannot use it.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    refuse_unusable_gpu(torch)
    return torch.device("cpu")


def load_model(path: Path, *, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu") -> Any:
    """Loads a causal language model in evaluation mode.

    If only weights are quantized, they are dequantized while loading. If activations are quantized too, their rounding
    is part of the model and stays. Of most multimodal models only the decoder is loaded.

    Args:
        path: a Hugging Face folder, quantized or not.
        dtype: dtype of floating-point parameters; "auto" for the folder's own.
        device: device to put the model on.

    Raises:
        DataError: the folder holds no model, transformers refuses it, or its tensors do not match the architecture.
    """
    logging.disable_progress_bar()  # its bars would interleave with ours
    how: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "trust_remote_code": False}
    folder = ModelFolder.open(path)
    if only_decoder_loads(folder.config) and folder.quantized_by is None:
        return _decoder(folder, dtype).to(device).eval()
    if needs_own_loader(folder):
        from pipeline.models.folder.compressed_folder import load_compressed  # noqa: PLC0415  imports compressed_tensors

        model = load_compressed(folder, dtype=dtype)
        return model.to(device).eval()
    if folder.quantized_by == "compressed-tensors" and not folder.quantizes_activations:
        # dequantized now instead of at the first forward pass: the same bits, without a remaining wrapper on every
        # layer that costs more than a small layer itself
        how["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    try:
        with warnings.catch_warnings():
            # drops the warning that the file's settings take precedence, as intended
            warnings.filterwarnings("ignore", message="You passed `quantization_config`")
            with _without_progress_bars():
                model, info = AutoModelForCausalLM.from_pretrained(path, **how)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise DataError(f"{path} cannot be loaded: {error}\n  try: export the model again") from error
    check_keys(path, info)
    if (names := extra_of(model, sorted(folder.every), folder.config)) and os.environ.get("RANK", "0") == "0":
        print(extra_line(path, names), file=sys.stderr, flush=True)
    return _decompressed(model.to(device).eval())


def _decoder(folder: ModelFolder, dtype: torch.dtype | str) -> Any:
    """Loads the decoder of a multimodal model alone."""
    from pipeline.models.construction.materialize import materialize  # noqa: PLC0415  other folders need none of these
    from pipeline.models.construction.meta import build_meta  # noqa: PLC0415
    from pipeline.models.construction.stored_values import FromSafetensors  # noqa: PLC0415
    from pipeline.models.hf_config import read_hf_config  # noqa: PLC0415

    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, folder.dtype)
    model: Any = build_meta(read_hf_config(folder.path), dtype=wanted, attn_implementation="sdpa")
    materialize(model, FromSafetensors(folder.path, model=model), device=torch.device("cpu"))
    if (folder.path / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder.path)
    return model


def needs_own_loader(folder: ModelFolder) -> bool:
    """Whether transformers would fail, or apply another layer's scheme to a layer: see `compressed_folder.py`."""
    if folder.quantized_by != "compressed-tensors":
        return False
    return has_experts(folder.config) or len(scheme_groups(folder.config)) > 1


def _decompressed(model: Any) -> Any:
    """Decompresses weights, as compressed-tensors would do (with a progress bar) at the first forward pass."""
    if hasattr(model, "ct_decompress_hook"):
        with _without_progress_bars():
            model.hf_quantizer.compressor.decompress_model(model)
    return model


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Drops progress bars, lines that begin with "\\r", from stderr: compressed-tensors has no switch for its bars."""
    kept = io.StringIO()
    try:
        with redirect_stderr(kept):
            yield
    finally:
        lines = [line for line in kept.getvalue().splitlines(keepends=True) if line.strip() and "it/s]" not in line]
        sys.stderr.write("".join(lines))


def empty_model(path: Path) -> Any:
    """Builds the folder's architecture on the meta device: modules and shapes, no memory, no weights.

    Raises:
        DataError: transformers does not know the architecture.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, trust_remote_code=False))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be loaded: {error}\n  try: export the model again") from error


def check_keys(path: Path, info: dict[str, Any]) -> None:
    """Checks what transformers reports of a loaded folder.

    Raises:
        DataError: tensors are missing or unexpected, except of layers that predict more tokens, or have other shapes.
    """
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        beside = extra_names(read_config(path), info[what]) if what == "unexpected_keys" else set()
        names = sorted(str(name) for name in info[what] if name not in beside)
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            word = what.removesuffix("_keys")
            raise DataError(f"{path} does not match its architecture: {word} {shown}\n  try: export the model again")
