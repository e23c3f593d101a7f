"""Small models of every architecture that can be pruned, in which parts of every kind do nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.evaluation.heldout.small import SEQUENCE, VOCAB
from tests.models.architectures import config_of, scale_up

HIDDEN, FFN, HEADS, GROUPS, LAYERS, EXPERTS, HEAD = 32, 48, 4, 2, 3, 4, 8
DEAD_HIDDEN, DEAD_FFN, DEAD_GROUP, DEAD_EXPERT, DEAD_LAYER = slice(3, 11), slice(5, 21), 1, 2, 1
"""What does nothing: 8 of 32 residual channels, 16 of 48 FFN channels, a key/value head of two, an expert, a layer."""

_COMMON: dict[str, Any] = {"head_dim": HEAD, "max_position_embeddings": 64, "vocab_size": VOCAB, "rms_norm_eps": 1e-3}
_ROUTED = ("mixtral", "qwen3_moe")
# one expert per token: a router's row between two others is never the highest, and of no two of four
_TOP1 = {"num_experts_per_tok": 1}
_EXPERTS = {**_TOP1, "norm_topk_prob": True, "moe_intermediate_size": FFN}
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama_biases", _COMMON),
    "mistral": ("mistral", {**_COMMON, "sliding_window": 7}),
    "qwen2": ("llama", {**_COMMON, "model_type": "qwen2", "tie_word_embeddings": True}),
    # the norms of queries and keys have the same eps, which is right for the residual's alone: 1e-6 as in real ones
    "qwen3": ("qwen3", {**_COMMON, "rms_norm_eps": 1e-6}),
    "gemma": ("gemma", _COMMON),
    "gemma2": ("gemma", {**_COMMON, "model_type": "gemma2", "query_pre_attn_scalar": 8, "sliding_window": 7}),
    "mixtral": ("mixtral", {**_COMMON, **_TOP1}),
    "qwen3_moe": ("qwen3_moe", {**_COMMON, **_EXPERTS, "rms_norm_eps": 1e-6}),
    "qwen3_moe_mixed": (
        "qwen3_moe",
        {**_COMMON, **_EXPERTS, "rms_norm_eps": 1e-6, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    ),
    "gpt2": ("gpt2", {"vocab_size": VOCAB, "n_inner": FFN, "bos_token_id": 0, "eos_token_id": 0}),
}
"""Architecture -> its base in `tests.models.architectures`, and fields."""


def build(name: str, *, dead: bool = True, **more: Any) -> Any:
    """A model with random weights, large enough that every part matters."""
    torch.manual_seed(1)
    base, fields = FIELDS[name]
    model: Any = AutoModelForCausalLM.from_config(config_of(base, **{**fields, **more})).eval()
    scale_up(model)
    if dead:
        silence(model)
    return model


def make(folder: Path, name: str, tokens: Path, *, dead: bool = True, **more: Any) -> Path:
    """Saves `build` with the tokenizer of a tokens directory."""
    build(name, dead=dead, **more).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tokens / "tokenizer").save_pretrained(folder)
    return folder


@torch.no_grad()
def silence(model: nn.Module) -> None:
    """Makes channels, a head, an expert and a layer do nothing."""
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            _silence_ffn(module)
        if name.endswith("self_attn"):
            _silence_group(module)
        if hasattr(module, "gate_up_proj") and module.gate_up_proj.ndim == 3:  # experts
            module.gate_up_proj.view(EXPERTS, 2, -1, HIDDEN)[:, 1, DEAD_FFN] = 0
    if model.config.model_type == "gpt2":  # type: ignore[union-attr]
        _silence_gpt2(model)
        return
    for name, parameter in model.named_parameters():
        _silence_parameter(name, parameter)


def _silence_gpt2(model: nn.Module) -> None:
    """A LayerNorm takes the mean of all channels away: what does nothing in it are channels that are the mean."""
    alive = [n for n in range(HIDDEN) if n not in range(*DEAD_HIDDEN.indices(HIDDEN))]
    for name, parameter in model.named_parameters():
        if f"h.{DEAD_LAYER}." in name and ".c_proj." in name:
            parameter.zero_()
        if "wte" in name or "wpe" in name or ".c_proj." in name:
            parameter[..., DEAD_HIDDEN] = parameter[..., alive].mean(-1, keepdim=True)
        if "ln_" in name and name.endswith("bias"):
            parameter[DEAD_HIDDEN] = 0
        if ".c_attn." in name:  # the values of a head are the last third
            parameter[..., 2 * HIDDEN + DEAD_GROUP * HEAD : 2 * HIDDEN + (DEAD_GROUP + 1) * HEAD] = 0


_INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight", "experts.down_proj", "o_proj.bias", "mlp.down_proj.bias")


def _silence_parameter(name: str, parameter: nn.Parameter) -> None:
    if name.endswith(_INTO_RESIDUAL):
        (parameter if parameter.ndim < 3 else parameter.transpose(0, 1))[DEAD_HIDDEN] = 0
        if f"layers.{DEAD_LAYER}." in name:
            parameter.zero_()
    if name.endswith("embed_tokens.weight"):
        parameter[:, DEAD_HIDDEN] = 0
    if name.endswith("mlp.gate.weight") and parameter.shape[0] == EXPERTS:
        parameter[DEAD_EXPERT] = (parameter[0] + parameter[1]) / 2


def _silence_ffn(mlp: Any) -> None:
    if hasattr(mlp, "c_fc"):
        mlp.c_fc.weight[:, DEAD_FFN] = 0
        mlp.c_fc.bias[DEAD_FFN] = 0
    elif hasattr(mlp, "up_proj"):
        mlp.up_proj.weight[DEAD_FFN] = 0
        if mlp.up_proj.bias is not None:
            mlp.up_proj.bias[DEAD_FFN] = 0


def _silence_group(attention: Any) -> None:
    head = attention.v_proj.weight.shape[0] // GROUPS
    rows = slice(DEAD_GROUP * head, (DEAD_GROUP + 1) * head)
    attention.v_proj.weight[rows] = 0
    if attention.v_proj.bias is not None:
        attention.v_proj.bias[rows] = 0


def logits(folder: Path, rows: torch.Tensor, *, without: Sequence[int] = ()) -> torch.Tensor:
    """By plain transformers, fp64, [B, T, V]; `without` some layers."""
    how = (
        {"experts_implementation": "eager"} if config_json(folder)["model_type"] in _ROUTED else {}
    )  # grouped products have no fp64
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **how).eval()
    for number in without:
        model.model.layers[number].forward = lambda hidden_states, *_, **__: hidden_states
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=rows).logits
    return found


def rows() -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, SEQUENCE), generator=torch.Generator().manual_seed(5))


def config_json(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
