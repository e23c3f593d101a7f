"""The language model inside a multimodal model: its architecture, and the names of its weights.

The decoder that processes text is also a separate architecture in transformers: Gemma 3 without its vision tower is
`gemma3_text`, Llava's decoder is `llama`. If positions have three parts (Qwen-VL), the parts are equal for text, which
is plain rotation. The tables contain only families whose logits a test has compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from foundation.foreign_json import read_json
from pipeline.models.folder.weight_files import TensorInfo

TEXT_ALONE = {
    **dict.fromkeys(("gemma3", "llava", "mistral3", "llava_next", "internvl", "idefics3"), None),
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
}
"""`model_type` -> `model_type` of the decoder; None if `text_config` names it."""

_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
}
"""Prefix of the decoder's names in files, published or written by transformers 5 -> prefix in the separate decoder."""


def text_is_nested(folder: Path, model_type: str) -> bool:
    """Whether a folder has a multimodal model, of which only the decoder is built."""
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else {}
    outer = config.get("model_type")
    return outer in TEXT_ALONE and outer != model_type


def text_tensors(stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Returns the tensors of the decoder, by their names in the separate decoder."""
    plain = {"model.": "model."} if not any(name.startswith(tuple(_NESTED)) for name in stored) else {}
    names = {**_PREFIXES, **plain}
    found = {}
    for name, info in stored.items():
        prefix = next((prefix for prefix in names if name.startswith(prefix)), None)
        if prefix is not None:
            found[names[prefix] + name.removeprefix(prefix)] = info
    return found


_NESTED = [prefix for prefix in _PREFIXES if prefix != "lm_head."]
