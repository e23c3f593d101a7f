"""Architectures that can be written as GGUF: the keys that llama.cpp reads, and the form of stored tensors. No torch.

Names are those of the package gguf. llama.cpp's loader of an architecture (in `src/models`) determines the keys and the
order of features; its converter's classes describe the format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH, GGUFWriter, RopeScalingType, TensorNameMap, get_tensor_name_map

from foundation.errors import ConfigError

Array = npt.NDArray[np.float32]
HfConfig = Mapping[str, Any]


@dataclass(frozen=True)
class GgufArchitecture:
    """A decoder architecture in GGUF.

    Attributes:
        arch: gguf's name of the architecture.
        permuted: whether queries and keys are stored with the halves of rotary positions interleaved.
        norm_offset: number added to the weights of norms.
        transposed: whether linear layers are stored [in, out] in the Hugging Face folder (Conv1D).
        kind: model types with the same keys: "llama", "gemma" or "gpt2".
    """

    arch: MODEL_ARCH
    permuted: bool = False
    norm_offset: float = 0.0
    transposed: bool = False
    kind: str = "llama"


ARCHITECTURES = {
    "llama": GgufArchitecture(MODEL_ARCH.LLAMA, permuted=True),
    "mistral": GgufArchitecture(MODEL_ARCH.LLAMA, permuted=True),
    "mixtral": GgufArchitecture(MODEL_ARCH.LLAMA, permuted=True),
    "qwen2": GgufArchitecture(MODEL_ARCH.QWEN2),
    "qwen3": GgufArchitecture(MODEL_ARCH.QWEN3),
    "qwen3_moe": GgufArchitecture(MODEL_ARCH.QWEN3MOE),
    "gemma": GgufArchitecture(MODEL_ARCH.GEMMA, norm_offset=1.0, kind="gemma"),
    "gemma2": GgufArchitecture(MODEL_ARCH.GEMMA2, norm_offset=1.0, kind="gemma"),
    "gpt2": GgufArchitecture(MODEL_ARCH.GPT2, transposed=True, kind="gpt2"),
}
"""`model_type` -> architecture."""


_SILU, _TANH = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"hidden_act": _SILU},
    "gemma": {"tie_word_embeddings": (True,), "use_bidirectional_attention": (False,)},
    "gpt2": {
        "activation_function": _TANH,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
}
"""`GgufArchitecture.kind` -> key of config.json -> values that llama.cpp uses; GGUF files do not contain these keys."""


def _fixed(config: HfConfig, architecture: GgufArchitecture) -> dict[str, tuple[Any, ...]]:
    """Maps keys of config.json to the values that llama.cpp uses regardless of the config."""
    found = dict(_FIXED[architecture.kind])
    if architecture.arch in (MODEL_ARCH.QWEN3, MODEL_ARCH.QWEN3MOE):
        found["attention_bias"] = (False,)
    if architecture.arch is MODEL_ARCH.GEMMA:
        found["hidden_act"] = (*_TANH, "gelu")  # transformers reads Gemma's "gelu" as the approximation by tanh
    if architecture.arch is MODEL_ARCH.GEMMA2:
        layers = layer_count(config)
        # llama.cpp recognizes Gemma 2's sizes by their layers; it scales the one of 46 layers by the width per head
        wide = layers == _GEMMA2_27B_LAYERS
        scalar = config["hidden_size"] // config["num_attention_heads"] if wide else head_size(config)
        kinds = ("sliding_attention", "full_attention")
        found |= {
            "hidden_activation": _TANH,
            "query_pre_attn_scalar": (scalar,),
            "layer_types": ([kinds[number % 2] for number in range(layers)],),
        }
    return found


_GEMMA2_27B_LAYERS = 46
_GEMMA2_SCALAR = 256
"""transformers' default of `query_pre_attn_scalar`."""


def _refuse_unlike_fixed(config: HfConfig, architecture: GgufArchitecture) -> None:
    """Refuses a config whose value of a key differs from the one fixed in llama.cpp's loader of the architecture.

    Raises:
        ConfigError: a value differs; names the key and llama.cpp's value.
    """
    remedy = "serve the Hugging Face folder with vLLM or transformers"
    for key, allowed in _fixed(config, architecture).items():
        value = config.get(key, _GEMMA2_SCALAR if key == "query_pre_attn_scalar" else None)
        if value is not None and value not in allowed:
            why = f"GGUF files do not hold it, and llama.cpp computes with {json.dumps(allowed[0])}"
            raise ConfigError(f"model ({key} of config.json)", value, why=why, remedy=remedy)
    if architecture.arch is MODEL_ARCH.GEMMA2:
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"):
            if not config.get(key):
                why = "llama.cpp's loader of Gemma 2 wants a number"
                raise ConfigError(f"model ({key} of config.json)", config.get(key), why=why, remedy=remedy)


def architecture_of(config: HfConfig) -> GgufArchitecture:
    """Returns the architecture of a Hugging Face config.

    Raises:
        ConfigError: the architecture cannot be written, or has a feature that llama.cpp's loader lacks.
    """
    kind = str(config.get("model_type"))
    found = ARCHITECTURES.get(kind)
    if found is None:
        remedy = f"models of {', '.join(ARCHITECTURES)} can be written"
        raise ConfigError("model", kind, why="GGUF files of this architecture are not written", remedy=remedy)
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key) and found.arch is MODEL_ARCH.LLAMA:
            why = f"{key} is true, and queries and keys with biases were not tried"
            raise ConfigError("model", kind, why=why, remedy="models without biases can be written")
    scaling = rope_scaling(config)
    if scaling not in ("default", "linear", "llama3", None):
        why = f"its rotary positions are scaled by {scaling}"
        raise ConfigError("model", kind, why=why, remedy="models with default, linear or llama3 scaling can be written")
    if found.arch is MODEL_ARCH.QWEN3MOE and not config.get("norm_topk_prob"):
        why = "norm_topk_prob is false, and llama.cpp divides the weights of the chosen experts by their sum"
        raise ConfigError("model", kind, why=why, remedy="serve the Hugging Face folder with vLLM or transformers")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        why = "some of its layers have no experts"
        raise ConfigError("model", kind, why=why, remedy="models with experts in every layer can be written")
    _refuse_unlike_fixed(config, found)
    return found


def rope_parameters(config: HfConfig) -> dict[str, Any]:
    """Returns `rope_parameters` of transformers 5, or `rope_scaling` and `rope_theta` before it."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "rope_theta" in config:
        found.setdefault("rope_theta", config["rope_theta"])
    return found


def rope_scaling(config: HfConfig) -> str | None:
    """Returns the type of rotary position scaling; None without scaling."""
    found = rope_parameters(config)
    return str(found.get("rope_type") or found.get("type") or "default") if found else None


def head_size(config: HfConfig) -> int:
    """Features of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def write_keys(writer: GGUFWriter, config: HfConfig, architecture: GgufArchitecture) -> None:
    """Adds the model's keys that llama.cpp needs."""
    (_gpt2_keys if architecture.kind == "gpt2" else _llama_keys)(writer, config, architecture)


def _gpt2_keys(writer: GGUFWriter, config: HfConfig, architecture: GgufArchitecture) -> None:
    width = config["n_embd"]
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(context_length(config, architecture))
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(config.get("n_inner") or 4 * width)
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _llama_keys(writer: GGUFWriter, config: HfConfig, architecture: GgufArchitecture) -> None:
    size, rope = head_size(config), rope_parameters(config)
    heads = config["num_attention_heads"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(context_length(config, architecture))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_key_length(size)
    writer.add_value_length(size)
    if rope_scaling(config) == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    _expert_keys(writer, config)
    if architecture.arch is MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])


def _expert_keys(writer: GGUFWriter, config: HfConfig) -> None:
    count = config.get("num_local_experts") or config.get("num_experts")
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def context_length(config: HfConfig, architecture: GgufArchitecture) -> int:
    """Context length of the file; at most the sliding window if llama.cpp's loader has none for the architecture."""
    if architecture.kind == "gpt2":
        return int(config.get("n_ctx") or config["n_positions"])
    length, window = int(config["max_position_embeddings"]), config.get("sliding_window")
    if window is None or architecture.kind == "gemma" or not config.get("use_sliding_window", True):
        return length
    return min(length, int(window))


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.")


def stored_name(name: str, names: TensorNameMap) -> str | None:
    """Returns the GGUF name of a tensor in a Hugging Face folder; None if llama.cpp has no such tensor."""
    expert = _EXPERT.fullmatch(name)
    if expert:
        name = f"{expert[1]}.{expert[3]}.weight"
    found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
    return found


def expert_number(name: str) -> int | None:
    """Returns the number of the expert that a tensor belongs to; None if it does not belong to a single expert."""
    expert = _EXPERT.fullmatch(name)
    return int(expert[2]) if expert else None


def name_map(config: HfConfig, architecture: GgufArchitecture) -> TensorNameMap:
    """Returns gguf's table for the architecture and the number of layers."""
    return get_tensor_name_map(architecture.arch, layer_count(config))


def layer_count(config: HfConfig) -> int:
    """Returns the number of decoder layers."""
    return int(config.get("num_hidden_layers") or config["n_layer"])


def stored_shape(name: str, shape: tuple[int, ...], architecture: GgufArchitecture) -> tuple[int, ...]:
    """Returns the shape of a tensor in the file; the shape of one expert if each expert has its own tensor."""
    return shape[::-1] if architecture.transposed and _is_conv1d(name) else shape


def stored_value(name: str, value: Array, config: HfConfig, architecture: GgufArchitecture) -> Array:
    """Converts a tensor's values to those in the file.

    Args:
        name: name of the tensor in the Hugging Face folder.
        value: fp32.
    """
    if architecture.transposed and _is_conv1d(name):
        return value.T
    if architecture.norm_offset and name.endswith("norm.weight"):
        return value + np.float32(architecture.norm_offset)
    if architecture.permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
        return interleaved(value, size=head_size(config))
    return value


def interleaved(value: Array, *, size: int) -> Array:
    """Interleaves the two halves of each head in rows [heads x size, D], for llama.cpp's rotation.

    Hugging Face rotates feature i with i + size / 2; llama.cpp's older architectures rotate 2i with 2i + 1.
    """
    rows, width = value.shape
    return value.reshape(rows // size, 2, size // 2, width).swapaxes(1, 2).reshape(rows, width)


def rope_factors(config: HfConfig) -> Array | None:
    """Returns Llama 3's divisors of the rotary frequencies [head size / 2]; None without its scaling.

    Source: transformers, modeling_rope_utils.py, `_compute_llama3_parameters`: frequencies of wavelengths above
    original / low are divided by the factor, those below original / high stay, and between the two both are mixed.
    """
    if rope_scaling(config) != "llama3":
        return None
    rope, size = rope_parameters(config), head_size(config)
    base, factor = float(rope["rope_theta"]), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    wavelengths = 2 * math.pi * base ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    kept: Array = (1.0 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return kept


def _is_conv1d(name: str) -> bool:
    return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
