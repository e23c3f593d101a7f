"""Maps the dims of stored tensors to sizes of the config, by architecture. No torch.

Names are those in the files, where experts are separate, because a model is cut tensor by tensor. Tensors that are not
in the table are refused: a forgotten one would make a folder that does not load, or gives wrong outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from foundation.errors import ConfigError, DataError
from pipeline.models.folder.model_folder import ModelFolder

HIDDEN, FFN, EXPERT_FFN = "hidden_size", "intermediate_size", "moe_intermediate_size"
GROUPS, EXPERTS, LAYERS = "num_key_value_heads", "num_experts", "num_hidden_layers"

_EXPERT_KEYS = ("num_experts", "num_local_experts")
"""Config keys of the number of experts: Qwen3-MoE on the Hub has the first, a save by transformers 5 the second."""

_LAYER, _EXPERT = r"model\.layers\.(?P<layer>\d+)\.", r"experts\.(?P<expert>\d+)\."
_GPT2 = r"(?:transformer\.)?"
_FUSED, _PARTS = "queries, keys, values", 3
"""Axis of a dim that queries, keys and values share in thirds (GPT-2), and the number of its parts."""
Dims = tuple[str | None, ...]

_ATTENTION: dict[str, Dims] = {
    r"model\.embed_tokens\.weight|lm_head\.weight": (None, HIDDEN),
    r"model\.norm\.weight": (HIDDEN,),
    _LAYER + r"(?:input|post_attention|pre_feedforward|post_feedforward)_layernorm\.weight": (HIDDEN,),
    _LAYER + r"self_attn\.[qkv]_proj\.weight": (GROUPS, HIDDEN),
    _LAYER + r"self_attn\.[qkv]_proj\.bias": (GROUPS,),
    _LAYER + r"self_attn\.o_proj\.weight": (HIDDEN, GROUPS),
    _LAYER + r"self_attn\.o_proj\.bias": (HIDDEN,),
    _LAYER + r"self_attn\.(?:[qk]_norm\.weight|rotary_emb\.\w+)": (None,),
}
_MLP: dict[str, Dims] = {
    _LAYER + r"mlp\.(?:gate|up)_proj\.weight": (FFN, HIDDEN),
    _LAYER + r"mlp\.(?:gate|up)_proj\.bias": (FFN,),
    _LAYER + r"mlp\.down_proj\.weight": (HIDDEN, FFN),
    _LAYER + r"mlp\.down_proj\.bias": (HIDDEN,),
}
_MIXTRAL: dict[str, Dims] = {
    _LAYER + r"block_sparse_moe\.gate\.weight": (EXPERTS, HIDDEN),
    _LAYER + r"block_sparse_moe\." + _EXPERT + r"w[13]\.weight": (FFN, HIDDEN),
    _LAYER + r"block_sparse_moe\." + _EXPERT + r"w2\.weight": (HIDDEN, FFN),
}
_QWEN_EXPERTS: dict[str, Dims] = {
    _LAYER + r"mlp\.gate\.weight": (EXPERTS, HIDDEN),
    _LAYER + r"mlp\." + _EXPERT + r"(?:gate|up)_proj\.weight": (EXPERT_FFN, HIDDEN),
    _LAYER + r"mlp\." + _EXPERT + r"down_proj\.weight": (HIDDEN, EXPERT_FFN),
}
_GPT2_BLOCK = _GPT2 + r"h\.(?P<layer>\d+)\."
_GPT2_TENSORS: dict[str, Dims] = {
    _GPT2 + r"wte\.weight|" + _GPT2 + r"wpe\.weight|lm_head\.weight": (None, HIDDEN),
    _GPT2 + r"ln_f\.(?:weight|bias)": (HIDDEN,),
    _GPT2_BLOCK + r"ln_[12]\.(?:weight|bias)": (HIDDEN,),
    _GPT2_BLOCK + r"attn\.c_attn\.weight": (HIDDEN, _FUSED),
    _GPT2_BLOCK + r"attn\.c_attn\.bias": (_FUSED,),
    _GPT2_BLOCK + r"attn\.c_proj\.weight": (GROUPS, HIDDEN),
    _GPT2_BLOCK + r"attn\.c_proj\.bias": (HIDDEN,),
    _GPT2_BLOCK + r"mlp\.c_fc\.weight": (HIDDEN, FFN),
    _GPT2_BLOCK + r"mlp\.c_fc\.bias": (FFN,),
    _GPT2_BLOCK + r"mlp\.c_proj\.weight": (FFN, HIDDEN),
    _GPT2_BLOCK + r"mlp\.c_proj\.bias": (HIDDEN,),
}
"""GPT-2's tensors; matrices of its Conv1D layers are [inputs, outputs]."""


@dataclass(frozen=True)
class Architecture:
    """Tensors and sizes of an architecture that can be cut.

    Attributes:
        tensors: pattern of a stored name -> axis of every dim; None for a dim that stays.
        keys: axis -> its key in config.json.
        unit_offset: whether a norm's weight is stored less 1 (Gemma).
        scaled_embedding: whether embeddings are multiplied by the root of hidden_size (Gemma).
        tensor_parallel: whether importance can be gathered with tensor parallelism.
        heads_of_hidden: whether a head always has hidden_size / heads features: heads and hidden size are cut together.
        norm_eps: config key of the norms' epsilon.
        transposed: whether matrices are stored as [inputs, outputs].
    """

    tensors: Mapping[str, Dims]
    keys: Mapping[str, str]
    unit_offset: bool = False
    scaled_embedding: bool = False
    tensor_parallel: bool = True
    heads_of_hidden: bool = False
    norm_eps: str = "rms_norm_eps"
    transposed: bool = False

    def matching(self, name: str) -> tuple[re.Match[str], Dims] | None:
        """The pattern that a stored name matches, and its dims; None for an unknown tensor."""
        for pattern, dims in self.tensors.items():
            if match := re.fullmatch(pattern, name):
                return match, dims
        return None


def _dense(**fields: Any) -> Architecture:
    return Architecture({**_ATTENTION, **_MLP}, {axis: axis for axis in (HIDDEN, FFN, GROUPS, LAYERS)}, **fields)


_GEMMA: dict[str, Any] = {"unit_offset": True, "scaled_embedding": True}
ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _dense()),
    "gemma": _dense(**_GEMMA),
    "gemma2": _dense(**_GEMMA, tensor_parallel=False),
    "mixtral": Architecture(
        {**_ATTENTION, **_MIXTRAL},
        {**{axis: axis for axis in (HIDDEN, FFN, GROUPS, LAYERS)}, EXPERTS: "num_local_experts"},
    ),
    "qwen3_moe": Architecture(
        {**_ATTENTION, **_MLP, **_QWEN_EXPERTS},
        {axis: axis for axis in (HIDDEN, FFN, EXPERT_FFN, GROUPS, EXPERTS, LAYERS)},
    ),
    "gpt2": Architecture(
        _GPT2_TENSORS,
        {HIDDEN: "n_embd", FFN: "n_inner", GROUPS: "n_head", LAYERS: "n_layer"},
        tensor_parallel=False,
        heads_of_hidden=True,
        norm_eps="layer_norm_epsilon",
        transposed=True,
    ),
}
"""model_type -> architecture."""


@dataclass(frozen=True)
class PrunableTensor:
    """A stored tensor of the model.

    Attributes:
        dims: (axis, features per unit of the axis) of every dim; (None, size) for a dim that stays.
        layer: index of its decoder layer, or None.
        expert: index of its expert, or None.
        parts: number of consecutive parts of the dim along the heads; each part has a share of every head's features.
    """

    dims: tuple[tuple[str | None, int], ...]
    layer: int | None
    expert: int | None
    parts: int = 1

    def elements(self, shape: Mapping[str, int]) -> int:
        """Number of the tensor's elements in a model with other sizes."""
        return prod(width if axis is None else width * shape[axis] for axis, width in self.dims)


@dataclass(frozen=True)
class Anatomy:
    """A model's sizes, and the tensors with these sizes.

    Attributes:
        architecture: architecture of the model.
        keys: axis -> its key in the folder's config.json.
        sizes: axis -> size, for the axes that the model has.
        tensors: stored name -> tensor.
        chosen_experts: number of routed experts per token; 0 without experts.
        uniform: whether all layers have the same tensors: leaving out any layer saves as many parameters.
        scaled_by_layer: whether the output of a layer depends on its number.
    """

    architecture: Architecture
    keys: Mapping[str, str]
    sizes: Mapping[str, int]
    tensors: Mapping[str, PrunableTensor]
    chosen_experts: int = 0
    uniform: bool = True
    scaled_by_layer: bool = False
    _kinds: dict[tuple[Any, bool, bool], int] = field(default_factory=dict, compare=False)

    @property
    def head_size(self) -> int:
        """Features of an attention head, in a model whose key/value heads can be cut."""
        if self.architecture.heads_of_hidden:
            return self.sizes[HIDDEN] // self.sizes[GROUPS]
        return self.tensors["model.layers.0.self_attn.k_proj.weight"].dims[0][1]

    def completed(self, shape: Mapping[str, int]) -> dict[str, int]:
        """All sizes with some replaced: the other sizes keep their value, or follow from a replaced one."""
        sizes = {**self.sizes, **shape}
        if self.architecture.heads_of_hidden:
            sizes[GROUPS] = sizes[HIDDEN] // self.head_size
        return sizes

    def parameters(self, shape: Mapping[str, int]) -> int:
        """Number of stored parameters with other sizes: exact if all layers have the same tensors.

        Args:
            shape: axis -> size; other axes keep their sizes.
        """
        sizes = self.completed(shape)
        if not self._kinds:
            for tensor in self.tensors.values():
                kind = (tensor.dims, tensor.layer is not None, tensor.expert is not None)
                self._kinds[kind] = self._kinds.get(kind, 0) + 1
        total = 0
        for (dims, in_layer, in_expert), count in self._kinds.items():
            many = count * PrunableTensor(dims, None, None).elements(sizes)
            many = many * sizes[EXPERTS] // self.sizes[EXPERTS] if in_expert else many
            total += many * sizes[LAYERS] // self.sizes[LAYERS] if in_layer else many
        return total


def anatomy_of(source: ModelFolder) -> Anatomy:
    """The sizes of a model and the dims of its tensors, from config.json and the safetensors headers.

    Raises:
        ConfigError: the architecture, or one of its tensors, is not in the table.
        DataError: a tensor's shape does not match the config.
    """
    kind = str(source.config.get("model_type"))
    if kind not in ARCHITECTURES:
        raise ConfigError(
            "model",
            str(source.path),
            why=f"it is a {kind}: headrace does not know which of its tensors belong together",
            remedy=f"use one of {', '.join(ARCHITECTURES)}, or model.keep_layers of a training run, which cuts layers",
        )
    architecture = ARCHITECTURES[kind]
    keys = dict(architecture.keys)
    if EXPERTS in keys:
        keys[EXPERTS] = next((key for key in _EXPERT_KEYS if key in source.config), keys[EXPERTS])
    sizes = _sizes(keys, source)
    tensors = {name: _tensor(architecture, source, name, sizes) for name in source.tensors}
    sizes = {axis: size for axis, size in sizes.items() if axis == LAYERS or _has(tensors, axis)}
    per_layer = [{(t.dims, t.expert) for t in tensors.values() if t.layer == number} for number in range(sizes[LAYERS])]
    uniform = all(each == per_layer[0] for each in per_layer)
    chosen = int(source.config.get("num_experts_per_tok") or 0) if EXPERTS in sizes else 0
    scaled = bool(source.config.get("scale_attn_by_inverse_layer_idx"))
    return Anatomy(architecture, keys, sizes, tensors, chosen, uniform, scaled)


def _has(tensors: Mapping[str, PrunableTensor], axis: str) -> bool:
    return any(axis == each for tensor in tensors.values() for each, _ in tensor.dims)


def _sizes(keys: Mapping[str, str], source: ModelFolder) -> dict[str, int]:
    config = source.config
    found = {axis: config.get(key) for axis, key in keys.items()}
    if GROUPS in found:
        found[GROUPS] = found[GROUPS] or config.get("num_attention_heads")
    if "n_inner" in keys.values():
        found[FFN] = found[FFN] or 4 * int(config.get("n_embd", 0))
    for axis, size in found.items():
        if not isinstance(size, int) or size < 1:
            raise DataError(f"{source.path}/config.json has no {keys[axis]}\n  try: export it again")
    return {axis: int(size or 0) for axis, size in found.items()}


def _tensor(architecture: Architecture, source: ModelFolder, name: str, sizes: Mapping[str, int]) -> PrunableTensor:
    found, stored = architecture.matching(name), source.tensors[name].shape
    if found is None:
        why = f"a {source.config['model_type']} has no known tensor {name}"
        remedy = "load the folder with transformers and save it with save_pretrained, or use another model"
        raise ConfigError("model", str(source.path), why=why, remedy=remedy)
    match, axes = found
    parts = _PARTS if _FUSED in axes else 1
    axes = tuple(GROUPS if axis == _FUSED else axis for axis in axes)
    if len(axes) != len(stored) or any(axis and size % sizes[axis] for axis, size in zip(axes, stored, strict=True)):
        raise DataError(f"{source.path}: {name} has shape {list(stored)}, which does not fit its config.json")
    dims = tuple((axis, size // sizes[axis] if axis else size) for axis, size in zip(axes, stored, strict=True))
    groups = match.groupdict()
    numbers = {key: int(groups[key]) if groups.get(key) is not None else None for key in ("layer", "expert")}
    return PrunableTensor(dims, **numbers, parts=parts)
