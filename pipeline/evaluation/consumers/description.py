"""Descriptions of models, from which a consumer's refusal is known before it starts. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.directory import MANIFEST
from foundation.foreign_json import read_json
from pipeline.models.folder.model_folder import ModelFolder, scheme_groups
from pipeline.models.folder.weight_files import HfFields

GGUF, FOLDER = "gguf", "folder"
GGUF_FILE = "model.gguf"


@dataclass(frozen=True)
class ModelDescription:
    """A model as the consumers see it.

    Attributes:
        scheme_format: GGUF or FOLDER.
        scheme: W4A16, W8A16, W8A8, FP8, or the type of a GGUF file (Q8_0, Q4_K_M, ...); float32, bfloat16 or float16
            without quantization.
        head_size: features of an attention head; None where it is not known.
        dense: schemes of the quantized layers of a folder, except its experts.
        experts: schemes of the quantized experts of a folder.
        experts_group: number of weights of an expert that share a scale; None for one scale per row.
        latent: whether the heads share a latent (DeepSeek's MLA).
        grouped_routing: whether a router first chooses groups of experts, as in DeepSeek's models.
        plain_experts: whether some experts stay in floating point, or may, beside quantized experts or beside layers
            that are mostly in integers.
    """

    scheme_format: str
    scheme: str
    head_size: int | None
    dense: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()
    experts_group: int | None = None
    latent: bool = False
    grouped_routing: bool = False
    plain_experts: bool = False

    @property
    def schemes(self) -> frozenset[str]:
        """The schemes of all layers."""
        return self.dense | self.experts | {self.scheme}


def describe(path: Path) -> ModelDescription:
    """Describes the model of a Hugging Face folder or a directory with model.gguf.

    Raises:
        DataError: the directory has neither, or is damaged.
    """
    if (path / GGUF_FILE).is_file():
        details = read_json(path / MANIFEST).get("details", {}) if (path / MANIFEST).is_file() else {}
        return ModelDescription(GGUF, str(details.get("quantization", {}).get("scheme", "GGUF")), None)
    folder = ModelFolder.open(path)
    quantized = {name.rpartition(".")[0] for name in folder.tensors if name.endswith(".weight_scale")}
    groups = scheme_groups(folder.config)
    # a group that names layers is for experts where a name has "experts"; "Linear" covers them too
    of_experts = [group for group in groups if any("experts" in each or each == "Linear" for each in _targets(group))]
    dense = [group for group in groups if any("experts" not in each for each in _targets(group))]
    experts = {module for name in folder.tensors if ".experts." in (module := name.rpartition(".")[0])}
    if not experts & quantized:
        of_experts = []
    return ModelDescription(
        FOLDER,
        scheme_of(folder),
        head_size(folder.config),
        dense=frozenset(map(_group_name, dense)),
        experts=frozenset(map(_group_name, of_experts)),
        experts_group=next((group["weights"].get("group_size") for group in of_experts), None),
        **architecture(folder.config),
        plain_experts=bool(experts - quantized and groups and (of_experts or _group_name(groups[0]) != "FP8")),
    )


def architecture(config: HfFields) -> HfFields:
    """The fields of a description that follow from a Hugging Face config alone, except `head_size`."""
    text = {**config, **(config.get("text_config") or {})}
    return {"latent": bool(text.get("kv_lora_rank")), "grouped_routing": text.get("n_group") is not None}


def _targets(group: dict[str, Any]) -> list[str]:
    return group.get("targets") or ["Linear"]


def scheme_of(folder: ModelFolder) -> str:
    """The scheme of a folder, from its quantization_config."""
    names = {_group_name(group) for group in scheme_groups(folder.config)}
    if len(names) > 1:
        return "mixed"
    return names.pop() if names else folder.quantized_by or folder.dtype


def _group_name(group: dict[str, Any]) -> str:
    """The scheme of a group of layers."""
    weights = group.get("weights") or {}
    if weights.get("type") == "float":
        return "FP8"
    return f"W{int(weights.get('num_bits', 0))}A{8 if group.get('input_activations') else 16}"


def head_size(config: HfFields) -> int | None:
    """Features of an attention head, from a Hugging Face config; None where heads share a latent (DeepSeek's MLA)."""
    text = {**config, **(config.get("text_config") or {})}
    if text.get("kv_lora_rank"):
        return None
    hidden = text.get("hidden_size") or text.get("n_embd")
    heads = text.get("num_attention_heads") or text.get("n_head")
    found = text.get("head_dim") or (hidden // heads if hidden and heads else None)
    return None if found is None else int(found)
