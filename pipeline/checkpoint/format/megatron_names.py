"""Maps names and fused tensors of Megatron-core's GPT models to Hugging Face's; `importing.megatron` has the format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LATEST, BACKEND, COMMON = "latest_checkpointed_iteration.txt", "metadata.json", "common.pt"
Split = Callable[[Tensor], Sequence[Tensor]]
Join = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Fusion:
    """Conversion, in both directions, between a Megatron tensor and the Hugging Face tensors fused in it.

    Attributes:
        names: Hugging Face names of the tensors, within a layer.
        split: function from Megatron's tensor to Hugging Face's, in the order of `names`.
        join: function from Hugging Face's tensors to Megatron's.
    """

    names: Sequence[str]
    split: Split
    join: Join


@dataclass(frozen=True)
class _Heads:
    """Numbers of query heads and key heads, with the conversions of fused projections."""

    query: int
    key: int

    def split(self, fused: Tensor) -> Sequence[Tensor]:
        """Splits a fused projection [key heads x (queries of one + 2) x head size, ...] into queries, keys, values."""
        per_key = self.query // self.key
        rest = fused.shape[1:]
        heads = fused.view(self.key, per_key + 2, -1, *rest)
        parts = heads.split([per_key, 1, 1], dim=1)
        return [part.reshape(-1, *rest) for part in parts]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Fuses the projections of queries, keys and values."""
        per_key = self.query // self.key
        rest = parts[0].shape[1:]
        heads = [each.view(self.key, count, -1, *rest) for each, count in zip(parts, (per_key, 1, 1), strict=True)]
        return torch.cat(heads, dim=1).reshape(-1, *rest)

    def split_together(self, fused: Tensor) -> Sequence[Tensor]:
        """Converts a fused projection to queries, keys and values concatenated; a matrix is [inputs, outputs]."""
        return [torch.cat(list(self.split(fused))).t()]

    def join_together(self, parts: Sequence[Tensor]) -> Tensor:
        """Inverts `split_together`."""
        return self.join(parts[0].t().contiguous().chunk(3))


def _same(*names: str) -> Fusion:
    return Fusion(names, lambda tensor: [tensor], lambda parts: parts[0])


def _transposed(*names: str) -> Fusion:
    return Fusion(names, lambda matrix: [matrix.t()], lambda parts: parts[0].t())


def _halves(*names: str) -> Fusion:
    return Fusion(names, lambda tensor: tensor.chunk(2), lambda parts: torch.cat(list(parts)))


@dataclass(frozen=True)
class MegatronNames:
    """Megatron's names of a Hugging Face family's tensors.

    Attributes:
        layers: prefix of our names before the layer's number.
        whole: Megatron's name -> ours, outside of layers.
        inner: Megatron's name in a layer -> ours. If two names map to one of ours, checkpoints use the last
            (Transformer Engine's fused norms).
    """

    layers: str
    whole: Mapping[str, str]
    inner: Mapping[str, Fusion]

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> MegatronNames | None:
        """Returns the names for the model of a Hugging Face config; None for an unknown family."""
        family = FAMILIES.get(str(hf_config.get("model_type")))
        if family is None:
            return None
        query = int(hf_config.get("num_attention_heads") or hf_config["n_head"])
        return family(_Heads(query, int(hf_config.get("num_key_value_heads") or query)))


def _llama(heads: _Heads) -> MegatronNames:
    mlp_norm = _same("post_attention_layernorm.weight")
    return MegatronNames(
        "model.layers.",
        {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
            "output_layer.weight": "lm_head.weight",
        },
        {
            "input_layernorm.weight": _same("input_layernorm.weight"),
            "self_attention.linear_qkv.layer_norm_weight": _same("input_layernorm.weight"),
            **{
                f"self_attention.linear_qkv.{kind}": Fusion(
                    [f"self_attn.{n}_proj.{kind}" for n in "qkv"], heads.split, heads.join
                )
                for kind in ("weight", "bias")
            },
            "self_attention.q_layernorm.weight": _same("self_attn.q_norm.weight"),
            "self_attention.k_layernorm.weight": _same("self_attn.k_norm.weight"),
            "self_attention.linear_proj.weight": _same("self_attn.o_proj.weight"),
            "pre_mlp_layernorm.weight": mlp_norm,
            "mlp.linear_fc1.layer_norm_weight": mlp_norm,
            "mlp.linear_fc1.weight": _halves("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "mlp.linear_fc2.weight": _same("mlp.down_proj.weight"),
            "mlp.router.weight": _same("mlp.gate.weight"),
            "mlp.experts.experts.linear_fc1.weight": _same("mlp.experts.gate_up_proj"),
            "mlp.experts.experts.linear_fc2.weight": _same("mlp.experts.down_proj"),
        },
    )


def _gpt2(heads: _Heads) -> MegatronNames:
    inner: dict[str, Fusion] = {}
    for kind in ("weight", "bias"):
        inner |= {
            f"input_layernorm.{kind}": _same(f"ln_1.{kind}"),
            f"self_attention.linear_qkv.layer_norm_{kind}": _same(f"ln_1.{kind}"),
            f"self_attention.linear_qkv.{kind}": Fusion(
                [f"attn.c_attn.{kind}"], heads.split_together, heads.join_together
            ),
            f"self_attention.linear_proj.{kind}": _transposed(f"attn.c_proj.{kind}"),
            f"pre_mlp_layernorm.{kind}": _same(f"ln_2.{kind}"),
            f"mlp.linear_fc1.layer_norm_{kind}": _same(f"ln_2.{kind}"),
            f"mlp.linear_fc1.{kind}": _transposed(f"mlp.c_fc.{kind}"),
            f"mlp.linear_fc2.{kind}": _transposed(f"mlp.c_proj.{kind}"),
        }
    whole = {
        "embedding.word_embeddings.weight": "transformer.wte.weight",
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        "decoder.final_layernorm.weight": "transformer.ln_f.weight",
        "decoder.final_layernorm.bias": "transformer.ln_f.bias",
        "output_layer.weight": "lm_head.weight",
    }
    return MegatronNames("transformer.h.", whole, inner)


FAMILIES = {**dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral"), _llama), "gpt2": _gpt2}
"""model_type -> function that returns its names."""
