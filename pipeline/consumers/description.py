"""What the consumers need to know of a model before they are started. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.directory import MANIFEST
from pipeline.evaluation.model_folder import ModelFolder

GGUF, FOLDER = "gguf", "folder"
GGUF_FILE = "model.gguf"
_FORMATS = {"int-quantized": "W8A8", "float-quantized": "FP8"}


@dataclass(frozen=True)
class ModelDescription:
    """A model as the consumers see it.

    Attributes:
        scheme_format: GGUF or FOLDER.
        scheme: W4A16, W8A16, W8A8, FP8, or the type of a GGUF file (Q8_0, Q4_K_M, ...); float32, bfloat16 or float16
            without quantization.
        head_size: features of an attention head; None where it is not known.
    """

    scheme_format: str
    scheme: str
    head_size: int | None


def describe(path: Path) -> ModelDescription:
    """Of a Hugging Face folder or a directory with model.gguf.

    Raises:
        DataError: neither is there, or it is damaged.
    """
    if (path / GGUF_FILE).is_file():
        details = json.loads((path / MANIFEST).read_text())["details"] if (path / MANIFEST).is_file() else {}
        return ModelDescription(GGUF, str(details.get("quantization", {}).get("scheme", "GGUF")), None)
    folder = ModelFolder.open(path)
    return ModelDescription(FOLDER, scheme_of(folder), head_size(folder.config))


def scheme_of(folder: ModelFolder) -> str:
    """The scheme of a folder, from its quantization_config."""
    section: dict[str, Any] | None = folder.config.get("quantization_config")
    if section is None:
        return folder.dtype
    if section.get("format") in _FORMATS:
        return _FORMATS[section["format"]]
    groups = list((section.get("config_groups") or {}).values())
    bits = [int((group.get("weights") or {}).get("num_bits", 0)) for group in groups]
    return f"W{max(bits)}A16" if any(bits) else str(section.get("quant_method"))


def head_size(config: dict[str, Any]) -> int | None:
    """Features of an attention head, from a Hugging Face config."""
    text = {**config, **(config.get("text_config") or {})}
    hidden = text.get("hidden_size") or text.get("n_embd")
    heads = text.get("num_attention_heads") or text.get("n_head")
    found = text.get("head_dim") or (hidden // heads if hidden and heads else None)
    return None if found is None else int(found)
