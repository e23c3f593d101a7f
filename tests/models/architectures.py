"""Tiny models of the architectures whose numerics are tested, in fp32, with weights initialized by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.engines.parallel.decoder import Decoder, DecoderLayout, parameter_owners
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from tests.engines.comparison import LATENT
from tests.sweeps.families import tiny_fields

V, T = 96, 24

_HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON = {**_HEADS, "intermediate_size": 48, "num_hidden_layers": 3}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NEOX = {"num_hidden_layers": 3, "intermediate_size": 48}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
_MIXTRAL = {"num_local_experts": 4, **_EXPERTS}
_FINE_GRAINED = {"num_experts": 4, "moe_intermediate_size": 24, **_EXPERTS}
_GEMMA = {**COMMON, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8, "pad_token_id": 0}
_LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 10,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **COMMON},
    "llama_tied": {"model_type": "llama", **COMMON, "tie_word_embeddings": True},
    "llama_biases": {"model_type": "llama", **COMMON, "attention_bias": True, "mlp_bias": True},
    "llama_padding": {"model_type": "llama", **COMMON, "pad_token_id": 5},
    "llama_one_kv_head": {"model_type": "llama", **COMMON, "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3", **COMMON, "head_dim": 16},
    "mistral": {"model_type": "mistral", **COMMON, "sliding_window": 7},
    "gemma": {"model_type": "gemma", **COMMON, "head_dim": 8, "pad_token_id": 0},
    "gemma2": {"model_type": "gemma2", **_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {"model_type": "gemma3_text", **_GEMMA, "layer_types": _LOCAL_GLOBAL},
    "phi3_longrope": {
        "model_type": "phi3",
        **COMMON,
        "pad_token_id": 0,
        "rope_parameters": _LONGROPE,
        "original_max_position_embeddings": 10,  # it wins over that of rope_parameters
    },
    "phimoe": {
        "model_type": "phimoe",
        **COMMON,
        **_MIXTRAL,
        **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), 0.0),
        "rope_parameters": {**_LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4},
    },
    "phi": {"model_type": "phi", **COMMON, "partial_rotary_factor": 0.5},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 32, "num_attention_heads": 4, **_NEOX},
    "starcoder2": {"model_type": "starcoder2", **COMMON},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64, **_NO_DROPOUT},
    "mixtral": {"model_type": "mixtral", **COMMON, **_MIXTRAL},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **COMMON,
        **_MIXTRAL,
        "head_dim": 8,
        "sliding_window": 7,
        "layer_types": _LOCAL_GLOBAL,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen2_moe": {"model_type": "qwen2_moe", **COMMON, **_FINE_GRAINED, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {"model_type": "qwen3_moe", **COMMON, **_FINE_GRAINED, "head_dim": 16},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **COMMON,
        **LATENT,
        "v_head_dim": 8,  # as published models have it, narrower than a key
        "n_shared_experts": 1,
        "rope_interleave": False,
    },
}

_CHUNKED = {"attention_chunk_size": 7, "floor_scale": 4, "attn_scale": 0.5, "no_rope_layers": [1, 0, 1, 0]}
_INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 5, "num_local_experts": 4}
_KINDS = ("bloom", "codegen", "gptj", "mpt", "nemotron", "openai-gpt", "stablelm", "xglm")
ADAPTED: dict[str, dict[str, Any]] = {
    **{kind: tiny_fields(kind) for kind in _KINDS},
    "deepseek_v32": {**CONFIGS["deepseek_v3"], "model_type": "deepseek_v32", **_INDEXER, "pad_token_id": 0},
    "falcon": {**tiny_fields("falcon"), "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_alibi": {**tiny_fields("falcon"), "alibi": True},
    "gpt_neo": {**tiny_fields("gpt_neo"), "window_size": 7},
    "gpt_neox_japanese": {**tiny_fields("gpt_neox_japanese"), "intermediate_multiple_size": 2},
    "llama4_text": {**tiny_fields("llama4_text"), **_CHUNKED, "pad_token_id": 0},
}
"""Architectures to which our attention is adapted."""


def config_of(name: str, **fields: Any) -> PretrainedConfig:
    given = {**(CONFIGS | ADAPTED)[name], "vocab_size": V, **fields}
    return CONFIG_MAPPING[given.pop("model_type")](**given)


def meta_of(name: str, *, attention: str = ATTENTION_NAME, **fields: Any) -> nn.Module:
    return build_meta(config_of(name, **fields), dtype=torch.float32, attn_implementation=attention)


def family_config(kind: str, **fields: Any) -> PretrainedConfig:
    """The config of a family's tiny model in the sweep over families, without a tokenizer."""
    return AutoConfig.for_model(**{**tiny_fields(kind), "pad_token_id": 1, "eos_token_id": 2, **fields})


def family_meta(kind: str, *, attention: str = ATTENTION_NAME, **fields: Any) -> Any:
    return build_meta(family_config(kind, **fields), dtype=torch.float32, attn_implementation=attention)


def with_weights(model: nn.Module, *, seed: int = 3, spread: float = 5.0) -> nn.Module:
    """Initializes a model's weights in place, larger than usual so that attention is far from uniform."""
    materialize(model, InitByName(model, seed=seed), device=torch.device("cpu"))
    scale_up(model, spread=spread)
    return model


@torch.no_grad()
def scale_up(model: nn.Module, *, spread: float = 5.0) -> None:
    """Enlarges matrices, and changes vectors from their trivial values (norms 1, biases 0), by name."""
    for name, parameter in model.named_parameters():
        parameter.copy_(enlarged(name, parameter, spread=spread))


def enlarged(name: str, value: torch.Tensor, *, spread: float = 5.0) -> torch.Tensor:
    """The value that tests give a parameter whose initial value is `value`."""
    if value.ndim > 1:
        return value * spread
    generator = torch.Generator().manual_seed(len(name) * 31 + value.numel())
    return value + 0.3 * torch.randn(value.shape, generator=generator)


def plain_decoder(name: str, *, attention: str = ATTENTION_NAME, chunk: int | None = None, **fields: Any) -> Decoder:
    model = with_weights(meta_of(name, attention=attention, **fields))
    layout = DecoderLayout(own_attention=attention == ATTENTION_NAME, chunk=chunk)
    return Decoder(model, layout, parameter_owners(model))


def batch_of(*, samples: int = 2, length: int = T, borders: tuple[tuple[int, ...], ...] | None = None) -> MicroBatch:
    """A micro-batch of random ids. `borders`: for each sample, positions at which a document begins."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(V, (samples, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    if borders is None:
        labels[0, 3] = IGNORE
        return MicroBatch(ids[:, :-1].contiguous(), labels)
    marks = torch.zeros(samples, length + 1, dtype=torch.int32)
    for row, starts in enumerate(borders):
        marks[row, list(starts)] = 1
    documents = marks.cumsum(1, dtype=torch.int32)
    labels[marks[:, 1:] == 1] = IGNORE
    positions = torch.arange(length)
    starts = torch.where(marks[:, :-1] == 1, positions, 0).cummax(1).values
    return MicroBatch(ids[:, :-1].contiguous(), labels, positions - starts, documents[:, :-1].contiguous())


def split_documents(batch: MicroBatch) -> list[MicroBatch]:
    """Every document of a packed micro-batch as a separate batch."""
    assert batch.documents is not None
    separate = []
    for ids, labels, numbers in zip(batch.input_ids, batch.labels, batch.documents, strict=True):
        for number in numbers.unique():
            own = numbers == number
            separate.append(MicroBatch(ids[own][None], labels[own][None]))
    return separate


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in decoder.parameters_by_name().items():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        parameter.grad = None
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, tolerance: float = 1e-5) -> None:
    """Compares gradients by name: the largest difference relative to the largest value of each."""
    assert found.keys() == expected.keys()
    worst = {n: float((found[n] - expected[n]).abs().max() / expected[n].abs().max().clamp(min=1e-6)) for n in found}
    wrong = {name: error for name, error in worst.items() if not error <= tolerance}
    assert not wrong, wrong
