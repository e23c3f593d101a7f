"""The language model inside a multimodal model: its architecture, and the names of its weights.

The decoder that processes text is also a separate architecture in transformers: Gemma 3 without its vision tower is
`gemma3_text`, Llava's decoder is `llama`. If positions have three parts (Qwen-VL), the parts are equal for text, which
is plain rotation. Mllama without its layers for images is `llama`, with fewer rows in the embedding. The tables contain
only families whose logits a test has compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from foundation.foreign_json import read_json
from pipeline.models.folder.extra_weights import layer_number, renumbered
from pipeline.models.folder.weight_files import HfFields, TensorInfo

TEXT_ALONE = {
    **dict.fromkeys(("gemma3", "llava", "mistral3", "llava_next", "internvl", "idefics3"), None),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_unified", "llama4"), None),
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "phi4_multimodal": "phi3",
    "mllama": "llama",
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
    outer = _fields(folder).get("model_type")
    return outer in TEXT_ALONE and outer != model_type


def only_decoder_loads(config: HfFields) -> bool:
    """Whether a folder has a multimodal model of which transformers' `AutoModelForCausalLM` does not load the whole.

    Args:
        config: the parsed config.json.
    """
    if config.get("model_type") not in TEXT_ALONE:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415  takes seconds

    return not str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])).endswith("ForConditionalGeneration")


@dataclass(frozen=True)
class TextPart:
    """The stored tensors of a multimodal model.

    Attributes:
        inside: Tensors of the decoder, by their names in the separate decoder.
        beside: Tensors of the other parts, by their names in the files.
        prefixes: Prefix in the separate decoder -> prefix in the files.
        files: All tensors, by their names in the files; one of the decoder may have more rows here than `inside`.
    """

    inside: dict[str, TensorInfo]
    beside: dict[str, TensorInfo]
    prefixes: dict[str, str]
    files: Mapping[str, TensorInfo]

    def name_in_files(self, name: str) -> str:
        """Returns the name in the files of a tensor of the decoder."""
        if name in self.inside:
            return self.inside[name].name
        prefix = next(each for each in self.prefixes if name.startswith(each))
        return self.prefixes[prefix] + name.removeprefix(prefix)


def text_part(folder: Path, stored: Mapping[str, TensorInfo]) -> TextPart:
    """Separates the tensors of the decoder from those of the other parts.

    Args:
        folder: the folder, whose config.json has the layers that Mllama leaves out for text.
        stored: all its tensors, by their names in the files.
    """
    plain = {"model.": "model."} if not any(name.startswith(tuple(_NESTED)) for name in stored) else {}
    names, config = {**_PREFIXES, **plain}, _fields(folder)
    text = config.get("text_config") or {}
    crossed = (text.get("cross_attention_layers") or _CROSSED) if config.get("model_type") == "mllama" else ()
    part = TextPart({}, {}, {}, stored)
    for name, info in stored.items():
        prefix = next((prefix for prefix in names if name.startswith(prefix)), None)
        layer = layer_number(name)
        if prefix is None or name.startswith(_INSIDE_MODEL) or layer in crossed:
            part.beside[name] = info
            continue
        part.prefixes.setdefault(names[prefix], prefix)
        own = names[prefix] + name.removeprefix(prefix)
        own = renumbered(own, by=-sum(each < layer for each in crossed))
        rows = text.get("vocab_size") if crossed and own.endswith("embed_tokens.weight") else None
        part.inside[own] = info if rows is None else replace(info, shape=(rows, *info.shape[1:]))
    return part


def _fields(folder: Path) -> HfFields:
    file = folder / "config.json"
    return read_json(file) if file.is_file() else {}


_NESTED = [prefix for prefix in _PREFIXES if prefix != "lm_head."]
_INSIDE_MODEL = "model.embed_tokens_extend."
"""Prefix of Phi-4-multimodal's other parts, inside the decoder's."""
_CROSSED = (3, 8, 13, 18, 23, 28, 33, 38)
"""Mllama's layers that attend to images, where config.json does not list them; text passes by them."""
