"""The table of layouts that `test_layouts.py` compares with one process: subject -> engine, processes -> name -> cell.

A layout of `tests/parity`, which has complete training runs, is no cell; nor is one in which `tests/sweeps` trains the
same family. A cell is swept unless its options are in no other cell of CI and in none of `tests/parity`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pytest

from tests.engines.comparison import EXPERTS, LATENT
from tests.parity.matrix import model_of
from tests.sweeps.families import tiny_fields

Keys = dict[str, Any]
Tier = tuple[pytest.MarkDecorator, ...]
ALWAYS, CI, SWEEP = (), (pytest.mark.integration,), (pytest.mark.sweep,)


@dataclass(frozen=True)
class Cell:
    """A layout.

    Attributes:
        keys: Config keys that differ from the reference's, and `steps` where these are not four.
        tier: Marks of its tests.
    """

    subject: str
    engine: str
    processes: int
    keys: Keys
    tier: Tier


def at(stage: int, *parts: Keys, tier: Tier = SWEEP, micro: int = 1, **parallel: Any) -> tuple[Tier, Keys]:
    """A layout's tier and config keys: its ZeRO stage, its parts, and fields of the section `parallel`."""
    sizes = {**zero(stage=stage), "train_micro_batch_size_per_gpu": micro}
    return tier, reduce(merged, ({"parallel": parallel}, *parts), sizes)


def merged(one: Keys, other: Keys) -> Keys:
    """Config keys of both, whose sections are merged; the other's values win."""
    new = {k: merged(one.get(k, {}), value) if isinstance(value, dict) else value for k, value in other.items()}
    return {**one, **new}


def zero(**fields: Any) -> Keys:
    return {"zero_optimization": fields}


def model(**fields: Any) -> Keys:
    return {"model": fields}


def family(kind: str) -> Keys:
    """A family's model of the sweep over families, in the place of the usual one."""
    return {"model": {**dict.fromkeys(model_of({"tied": True})), **tiny_fields(kind), "vocab_size": 64}}


def optimizer(kind: str, **params: Any) -> Keys:
    return {"optimizer": {"type": kind, "params": {"weight_decay": 0.1, **params}}}


def fp8(recipe: str, *, gather: bool = False) -> Keys:
    fields = {"enabled": True, "emulate": True, "recipe": recipe, "fsdp_all_gather": gather}
    return {**BF16, **CALM, **SIZES, "fp8": fields}


LONG, CLIPPED = {"steps": 20}, {"gradient_clipping": 0.1}
BF16 = {"bf16": {"enabled": True}}
REDUCED_IN_BF16 = {**BF16, "communication_data_type": "bf16"}
# gradients overflow at the initial scale: the layout and the reference must skip the same steps
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}}
CHUNKED, Z_LOSS = {"loss": {"chunk": 8}}, {"loss": {"z_loss": 1e-3}}
FULL, SELECTIVE = ({"memory": {"activation_checkpointing": mode}} for mode in ("full", "selective"))
INDUCTOR, AOT = {"compile": {"enabled": True}}, {"compile": {"enabled": True, "backend": "aot_eager"}}
INTERLEAVED, DUALPIPEV, ZERO_BUBBLE = (
    {"parallel": {"schedule": each}} for each in ("interleaved_1f1b", "dualpipev", "zero_bubble")
)
RING, ULYSSES = ({"parallel": {"cp_method": each}} for each in ("ring", "ulysses"))
OVERLAPPED, ELASTIC = ({"parallel": {key: True}} for key in ("ep_overlap", "elastic"))

OPTIMIZER_ON_CPU = zero(offload_optimizer={"device": "cpu"})
WEIGHTS_ON_CPU = zero(offload_param={"device": "cpu"})
HPZ = zero(zero_hpz_partition_size=2)
# every parameter is partitioned, and buckets are filled more than once
SMALL = zero(stage3_param_persistence_threshold=0, sub_group_size=4096, reduce_bucket_size=4096)
DISK = {"device": "nvme", "nvme_path": "{work}"}
# tensors below 1 MiB stay in memory: the model must be large enough that most are offloaded
SWAPPED = {
    **zero(sub_group_size=300_000, offload_optimizer=DISK),
    **model(hidden_size=128, intermediate_size=256, num_key_value_heads=4),
}
WEIGHTS_SWAPPED = zero(offload_param={**DISK, "buffer_size": 1_000_000, "max_in_cpu": 0})

UNTIED, BIASES, LAYERS_8 = model(tie_word_embeddings=False), model(attention_bias=True), model(num_hidden_layers=8)
MOE = model(**EXPERTS)
MLA = model(model_type="deepseek_v3", **LATENT, v_head_dim=16)
ONE_EACH = merged(MOE, model(num_experts=2, num_experts_per_tok=1))
MIXTRAL = model(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
SHARED_EXPERT = merged(MLA, model(moe_intermediate_size=32, n_shared_experts=1, rope_interleave=False))
GROUPED = model(n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=1, v_head_dim=8)
DEEPSEEK = reduce(merged, (GROUPED, UNTIED, model(moe_intermediate_size=16)), MLA)
MASKED = {"data": {"sources": [{"path": "none"}], "sequence_length": 32, "mask_documents": True}}
DENSE_FIRST = merged(DEEPSEEK, model(num_hidden_layers=4, first_k_dense_replace=3))
GLM = merged(
    model(model_type="glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
    model(first_k_dense_replace=1, n_group=1, topk_group=1),
)
_LINEAR: Keys = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 16}
_QWEN3_NEXT: Keys = {f"linear_{key}": size for key, size in _LINEAR.items()} | {"shared_expert_intermediate_size": 16}
_QWEN3_NEXT |= {"model_type": "qwen3_next", "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2}
QWEN3_NEXT = merged(UNTIED, model(**{**EXPERTS, **_QWEN3_NEXT}))
MTP, MTP_2 = ({"loss": {"mtp": {"depth": depth, "weight": 0.5}}} for depth in (1, 2))
GPT_OSS = merged(MIXTRAL, model(model_type="gpt_oss", head_dim=8, sliding_window=12, tie_word_embeddings=False))
STABLELM = model(model_type="stablelm")
_CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
GEMMA2 = model(model_type="gemma2", head_dim=8, query_pre_attn_scalar=8, sliding_window=12, **_CAPS)
# stages that are derived: positions are learned or biases, layers have several kinds; heads that scale or cap logits
_ABSENT = dict.fromkeys(("intermediate_size", "num_key_value_heads"))  # keys that these families do not have
_NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2 = model(model_type="gpt2", **_ABSENT, **_NO_DROPOUT)
OLMOE = model(model_type="olmoe", num_experts=4, num_experts_per_tok=2)
COHERE = model(model_type="cohere", logit_scale=0.25, pad_token_id=0)

# more than hidden states between stages: streams, an input per layer, keys of earlier layers
_INPUTS = {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
_STREAMS = {"altup_num_inputs": 2, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4}
_KINDS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 12}
GEMMA3N = model(model_type="gemma3n_text", head_dim=8, **_INPUTS, **_STREAMS, **_KINDS)

# at 50 times the default weight, a missing auxiliary loss or one of another scale exceeds the tolerance 100-fold
AUX_50, AUX_10 = ({"moe": {"balance": "aux_loss", "aux_loss_coef": weight}} for weight in (0.5, 0.1))
BIAS = {"moe": {"balance": "bias", "bias_update_rate": 0.02}}

SGD, PLAIN_SGD = optimizer("SGD", lr=0.3, momentum=0.9, nesterov=True), optimizer("SGD", lr=0.3)
LION, MUON = optimizer("Lion", lr=3e-3, betas=[0.9, 0.99]), optimizer("Muon", lr=3e-3, adam_lr=2e-3)
# the worker's rate grows with the step: at those above, the curve of 20 steps is chaotic, and rounding becomes 1.4e-4.
# In 4 steps a decay rate of Lion's momentum that is wrong by 0.01 changes the loss by 6e-6 only: some run for 20
CALM_SGD, CALM_LION = (
    {**LONG, **merged(each, {"optimizer": {"params": {"lr": lr}}})} for each, lr in ((SGD, 0.03), (LION, 1e-3))
)
# QK-Clip changes two matrices after Muon's step: such a layout says of Muon what the same one without it would
QK_CLIP, QK_CLIP_LOW = (merged(MUON, {"optimizer": {"params": {"qk_clip": each}}}) for each in (0.05, 0.002))

# halved by tp they are multiples of 16 or of 32
SIZES = model(hidden_size=64, intermediate_size=128, num_key_value_heads=4)
# at 3e-3 the curves of layouts that round to fp8 otherwise part: ZeRO-1 with tp 2 by 2.3e-3 in the held-out loss
CALM = {"optimizer": {"params": {"lr": 1e-3, "betas": [0.0, 0.95], "weight_decay": 0.1}}}

TABLE: Mapping[str, Mapping[tuple[str, int], Mapping[str, tuple[Tier, Keys]]]] = {
    "sharding": {
        ("torch", 2): {
            "stage 1, 20 steps": at(1, LONG),
            "stage 1, bf16, chunked loss": at(1, BF16, CHUNKED),
            "weights gathered per step": at(2, tier=ALWAYS),
            "dualpipev": at(0, DUALPIPEV, pp=2),
            "interleaved, ends without layers": at(2, INTERLEAVED, tier=CI, pp=2, virtual_stages=3),
            "interleaved, last without layers": at(1, INTERLEAVED, model(num_hidden_layers=5), pp=2, virtual_stages=3),
            "pipeline, 3 times as fast on the first rank": at(2, pp=2, stage_speeds=[3, 1]),
            "interleaved, twice as fast on the last rank": at(2, INTERLEAVED, LAYERS_8, pp=2, stage_speeds=[1, 2]),
            "reduced in bf16": at(3, REDUCED_IN_BF16, tier=CI),
            "bf16, pipeline": at(2, BF16, pp=2),
            "fp16": at(3, FP16, tier=ALWAYS),
        },
        ("torch", 4): {
            "stage 1, hybrid, clipped": at(1, CLIPPED, hybrid_shard_size=2),
            "stage 1, dp 2 x tp 2": at(1, tp=2),
            "stage 1, pp 2 x dp 2, interleaved": at(1, INTERLEAVED, pp=2),
            "stage 1, experts, ep 2": at(1, MOE, ep=2),
            "hybrid": at(3, tier=ALWAYS, hybrid_shard_size=2),
            "hpZ, 2 of 4": at(3, HPZ),
            "pp 2 x tp 2, untied": at(2, UNTIED, tier=ALWAYS, pp=2, tp=2),
            "pp 4, dualpipev, clipped, 20 steps": at(2, DUALPIPEV, LAYERS_8, CLIPPED, LONG, pp=4),
            "pp 2 x tp 2, dualpipev, full": at(2, DUALPIPEV, FULL, pp=2, tp=2),
            "pp 2 x dp 2, ends without layers, full": at(3, INTERLEAVED, FULL, pp=2, virtual_stages=3),
            "pp 2 x tp 2, ends without layers": at(2, INTERLEAVED, AOT, SELECTIVE, pp=2, tp=2, virtual_stages=3),
            "experts": at(3, MOE, tier=ALWAYS),
        },
        ("deepspeed", 2): {
            "stage 0, fp16": at(0, FP16, tier=CI),
            "stage 1, bf16, optimizer on the cpu": at(1, OPTIMIZER_ON_CPU, BF16),
            "stage 3, optimizer and weights on the cpu": at(3, OPTIMIZER_ON_CPU, WEIGHTS_ON_CPU, SMALL, tier=CI),
            "stage 3, reduced in bf16": at(3, SMALL, REDUCED_IN_BF16, tier=CI),
            "pp 2, stage 1, 3 times as fast on the first rank": at(1, tier=CI, pp=2, stage_speeds=[3, 1]),
            "experts, stage 3": at(3, SMALL, MOE),
        },
        ("deepspeed", 4): {"stage 3, hpZ, 2 of 4": at(3, SMALL, HPZ)},
    },
    "NVMe": {  # DeepSpeed compiles its AIO operator for minutes at first use
        ("deepspeed", 2): {
            "optimizer": at(3, SWAPPED),
            "optimizer and weights": at(3, SWAPPED, WEIGHTS_SWAPPED),
            "experts": at(3, SWAPPED, WEIGHTS_SWAPPED, MOE, model(moe_intermediate_size=128), ep=2),
        },
    },
    "experts": {  # overlapped exchanges in a pipeline: tests/parity
        ("torch", 2): {
            "selective": at(3, MOE, SELECTIVE, ep=2),
            "overlapped, unsharded": at(0, MOE, OVERLAPPED, ep=2),
            "overlapped, cp 2": at(2, MOE, OVERLAPPED, ep=2, cp=2),
            "overlapped, tp 2": at(2, MOE, OVERLAPPED, ep=2, tp=2),
            "overlapped, compiled": at(2, MOE, OVERLAPPED, AOT, FULL, ep=2),
            "overlapped, balanced, full": at(2, MOE, OVERLAPPED, AUX_10, FULL, ep=2),
            "deepseek v3, selective": at(2, DEEPSEEK, SELECTIVE, ep=2),
            "overlapped, deepseek v3, selective": at(2, DEEPSEEK, OVERLAPPED, SELECTIVE, ep=2),
            "overlapped, selective": at(2, MOE, OVERLAPPED, SELECTIVE, ep=2),
            "balanced": at(3, MOE, AUX_10, ep=2),
            "mixtral": at(3, MIXTRAL, ep=2),
            "deepseek v3": at(3, DEEPSEEK, ep=2),
            "glm4 moe": at(3, GLM, ep=2),
            "gpt oss, biases": at(3, GPT_OSS, ep=2),
        },
        ("torch", 4): {
            "ep 2 x edp 2": at(3, MOE, tier=ALWAYS, ep=2),
            "ep 4, more ranks than rows of tp": at(3, MOE, ep=4, tp=2),
            "tp 2, hybrid": at(3, MOE, ep=2, tp=2, hybrid_shard_size=1),
            "ep 2 x edp 2, overlapped": at(2, MOE, OVERLAPPED, ep=2),
            "overlapped, hybrid": at(2, MOE, OVERLAPPED, ep=2, hybrid_shard_size=2),
            "pp 2, 1f1b": at(3, MOE, tier=CI, ep=2, pp=2),
            "pp 2, dualpipev": at(2, DUALPIPEV, MOE, ep=2, pp=2),
            "pp 2, dualpipev, overlapped": at(2, DUALPIPEV, MOE, OVERLAPPED, ep=2, pp=2),
            "pp 2, dualpipev, overlapped, mixtral, full": at(0, DUALPIPEV, MIXTRAL, OVERLAPPED, FULL, ep=2, pp=2),
            "Muon, edp 2 over 1 expert each": at(3, ONE_EACH, MUON, ep=2),
            "ep 2 x edp 2, Muon": at(3, MOE, MUON, ep=2),
            "Muon, pp 2, tp 2": at(2, MOE, MUON, ep=2, pp=2, tp=2),
            "edp 2 over 1 expert each": at(3, ONE_EACH, ep=2),
        },
        ("deepspeed", 2): {
            "stage 0, fp16": at(0, MOE, FP16, ep=2),
            "stage 1, optimizer on the cpu": at(1, MOE, OPTIMIZER_ON_CPU, CLIPPED, ep=2),
            "stage 2, optimizer on the cpu": at(2, MOE, OPTIMIZER_ON_CPU, CLIPPED, ep=2),
            "stage 2, gpt oss, biases": at(2, GPT_OSS, ep=2),
            "stage 3, optimizer and weights on the cpu": at(
                3, MOE, OPTIMIZER_ON_CPU, WEIGHTS_ON_CPU, SMALL, CLIPPED, ep=2
            ),
            "stage 3, reduced in bf16": at(3, MOE, SMALL, REDUCED_IN_BF16, ep=2),
            "stage 3, cp 2, compiled": at(3, MOE, AOT, ep=2, cp=2),
            "stage 3, balanced, full, 20 steps": at(3, MOE, SMALL, FULL, AUX_10, LONG, ep=2),
        },
        ("deepspeed", 4): {
            "stage 0, ep 2 x edp 2, clipped": at(0, MOE, CLIPPED, ep=2),
            "stage 0, ep 2 x edp 2, Muon": at(0, MOE, MUON, ep=2),
            "stage 1, ep 2 x edp 2, Muon": at(1, MOE, MUON, ep=2),
            "stage 2, tp 2": at(2, MOE, tier=CI, ep=2, tp=2),
            "stage 3, ep 2 x edp 2, Muon": at(3, MOE, SMALL, MUON, ep=2),
            "stage 0, pp 2, dense first stage": at(0, DENSE_FIRST, ep=2, pp=2),
            "stage 1, pp 2, dense first stage": at(1, DENSE_FIRST, CLIPPED, ep=2, pp=2),
        },
    },
    "balance of experts": {  # a balance of the micro-batch would differ in those of other sizes
        ("torch", 2): {
            "stage 3": at(3, MOE, AUX_50, micro=2),
            "Mixtral, accumulation 4": at(2, MIXTRAL, UNTIED, AUX_50),
            "tp 2": at(3, MOE, AUX_50, micro=4, tp=2),
            "pp 2, full": at(2, MOE, AUX_50, FULL, tier=CI, micro=2, pp=2),
            "pp 2, zero bubble": at(2, ZERO_BUBBLE, MOE, AUX_50, micro=2, pp=2),
            "pp 2, Mixtral, interleaved": at(3, INTERLEAVED, MIXTRAL, UNTIED, AUX_50, micro=2, pp=2),
            "cp 2": at(3, MOE, AUX_50, micro=2, cp=2),
            "bias": at(3, SHARED_EXPERT, BIAS, micro=2),
            "bias, pp 2": at(2, SHARED_EXPERT, BIAS, micro=2, pp=2),
            "bias and auxiliary loss": at(2, SHARED_EXPERT, AUX_50, BIAS, micro=2),
            "bf16": at(3, MOE, AUX_50, BF16, micro=2),
            "fp16": at(3, MOE, AUX_50, FP16, micro=2),
        },
        ("deepspeed", 2): {
            "stage 0": at(0, MOE, AUX_50, micro=2),
            "stage 1": at(1, MOE, AUX_50, tier=CI, micro=2),
            "stage 1, tp 2": at(1, MOE, AUX_50, micro=2, tp=2),
            "stage 2, cp 2, Mixtral": at(2, MIXTRAL, UNTIED, AUX_50, micro=2, cp=2),
            "stage 3, full": at(3, MOE, AUX_50, FULL, micro=2),
            "stage 1, pp 2": at(1, MOE, AUX_50, micro=2, pp=2),
            "bias, stage 3": at(3, SHARED_EXPERT, BIAS, tier=CI, micro=2),
            "bias, bf16, stage 1": at(1, SHARED_EXPERT, BIAS, BF16, micro=2),
            "fp16, stage 0": at(0, MOE, AUX_50, FP16, micro=2),
        },
    },
    "optimizers": {  # Muon with QK-Clip and tp: tests/parity
        ("torch", 2): {
            "sgd, unsharded": at(0, SGD),
            "sgd, fsdp2": at(3, SGD, CLIPPED),
            "sgd without momentum, fsdp2": at(3, PLAIN_SGD),
            "sgd, tp 2": at(2, SGD, tp=2),
            "lion, fsdp2": at(3, CALM_LION),
            "lion, fsdp2, bf16": at(3, LION, BF16),
            "lion, tp 2": at(2, LION, tp=2),
            "lion, pp 2": at(2, LION, pp=2),
            "muon, fsdp2, experts": at(3, MUON, MOE, tier=CI),
            "qk_clip, unsharded": at(0, QK_CLIP, BIASES),
            "qk_clip, fsdp2": at(3, QK_CLIP, BIASES),
            "qk_clip, fsdp2, bf16": at(3, QK_CLIP, BF16),
            "qk_clip, ep 2, latent": at(2, QK_CLIP_LOW, MLA, tier=CI, ep=2),
            "qk_clip, tp 2": at(2, QK_CLIP, BIASES, tp=2),
            "qk_clip, pp 2": at(2, QK_CLIP, pp=2),
            "qk_clip, ring, compiled": at(3, RING, QK_CLIP, AOT, cp=2),
            "qk_clip, ulysses, one key head, selective": at(
                3, ULYSSES, QK_CLIP, model(num_key_value_heads=1), SELECTIVE, cp=2
            ),
        },
        ("deepspeed", 2): {
            "sgd, stage 0, clipped": at(0, SGD, CLIPPED),
            "sgd, stage 1": at(1, CALM_SGD),
            "sgd, stage 3": at(3, SMALL, SGD),
            "sgd, stage 1, bf16": at(1, SGD, BF16),
            "sgd without momentum, stage 3": at(3, SMALL, PLAIN_SGD),
            "sgd, tp 2": at(1, SGD, tp=2),
            "sgd, stage 2, optimizer on the cpu": at(2, OPTIMIZER_ON_CPU, SGD),
            "lion, stage 0": at(0, LION),
            "lion, stage 1": at(1, CALM_LION),
            "lion, stage 3, clipped": at(3, SMALL, LION, CLIPPED, tier=CI),
            "lion, stage 1, bf16": at(1, LION, BF16),
            "lion, tp 2": at(3, SMALL, LION, tp=2),
            "lion, pp 2": at(1, LION, pp=2),
            "qk_clip, stage 0": at(0, QK_CLIP, BIASES),
            "qk_clip, stage 1, bf16": at(1, QK_CLIP, BF16),
            "qk_clip, stage 2": at(2, QK_CLIP, BIASES),
            "qk_clip, stage 3": at(3, SMALL, QK_CLIP, BIASES, tier=CI),
            "qk_clip, tp 2": at(3, SMALL, QK_CLIP, tp=2),
            "qk_clip, pp 2": at(1, QK_CLIP, pp=2),
            "qk_clip, ulysses": at(1, ULYSSES, QK_CLIP, cp=2),
        },
    },
    "kinds of attention": {
        ("torch", 2): {
            "sinks, cp 2, ring": at(3, RING, GPT_OSS, cp=2),
            "adapted, cp 2, ring, full, compiled": at(3, RING, STABLELM, AOT, FULL, tier=CI, cp=2),
            "soft cap, cp 2, ulysses, compiled, selective": at(2, ULYSSES, GEMMA2, AOT, SELECTIVE, cp=2),
        },
        ("deepspeed", 2): {
            "adapted, stage 3, cp 2, ulysses": at(3, SMALL, ULYSSES, STABLELM, cp=2),
            "soft cap, stage 1, cp 2, ring": at(1, RING, GEMMA2, tier=CI, cp=2),
        },
    },
    "compiled": {
        ("torch", 2): {
            "selective": at(3, AOT, SELECTIVE, tier=CI),
            "full, inductor": at(3, INDUCTOR, FULL, tier=CI),
            "cp 2, ring, full": at(3, RING, AOT, FULL, cp=2),
            "chunked loss, inductor": at(3, INDUCTOR, CHUNKED, Z_LOSS),
            "tp 2, chunked loss": at(2, AOT, CHUNKED, tp=2),
            "qk_clip, selective": at(3, AOT, SELECTIVE, QK_CLIP),
            "pp 2, full, zero bubble": at(2, ZERO_BUBBLE, AOT, FULL, pp=2),
            "balanced experts, full": at(3, AOT, FULL, MOE, AUX_50, micro=2),
        },
        ("deepspeed", 2): {
            "stage 2, inductor": at(2, INDUCTOR),
            "stage 3, full": at(3, AOT, FULL),
            "stage 1, pp 2": at(1, AOT, pp=2),
        },
    },
    "multi-token prediction": {
        ("torch", 2): {
            "DeepSeek-V3, pp 2, full, compiled": at(2, DEEPSEEK, MTP_2, FULL, AOT, pp=2),
            "tied, pp 2, chunked loss": at(3, MTP, CHUNKED, tier=CI, pp=2),
            "fsdp2, experts, chunked loss, selective": at(3, DEEPSEEK, MTP_2, CHUNKED, SELECTIVE, tier=CI),
            "ep 2": at(3, DEEPSEEK, MTP, ep=2),
            "tp 2": at(3, MTP_2, UNTIED, tp=2),
            "DeepSeek-V3, tp 2": at(2, DEEPSEEK, MTP, tp=2),
            "Qwen3-Next, fsdp2": at(3, QWEN3_NEXT, MTP),
            "Qwen3-Next, pp 2": at(2, QWEN3_NEXT, MTP, pp=2),
            "GLM-4-MoE, bias": at(2, GLM, MTP, BIAS, micro=2),
            "cp 2, ring": at(3, RING, MTP_2, cp=2),
            "cp 2, ulysses": at(2, ULYSSES, DEEPSEEK, MTP_2, cp=2),
        },
        ("deepspeed", 2): {
            "stage 3, experts": at(3, DEEPSEEK, SMALL, MTP_2),
            "stage 1, tp 2": at(1, MTP, tp=2),
            "stage 1, pp 2, untied": at(1, UNTIED, MTP_2, CLIPPED, pp=2),
            "stage 0, ep 2": at(0, DEEPSEEK, MTP, ep=2),
            "stage 2, cp 2": at(2, MTP_2, cp=2),
        },
    },
    "derived stages": {
        ("torch", 2): {
            "GPT-2": at(2, GPT2, tier=CI, pp=2),
            "GPT-2, bf16, interleaved, full": at(2, GPT2, BF16, INTERLEAVED, FULL, pp=2),
            "GPT-2, zero bubble": at(2, GPT2, ZERO_BUBBLE, pp=2),
            "Gemma 2, chunked loss": at(2, GEMMA2, CHUNKED, pp=2),
            "Cohere": at(2, COHERE, Z_LOSS, pp=2),
            "Gemma 3n": at(2, GEMMA3N, tier=CI, pp=2),
            "Gemma 3n, interleaved, bf16": at(3, GEMMA3N, INTERLEAVED, BF16, pp=2),
            "GPT-2, tp 2": at(3, GPT2, tier=CI, tp=2),
            "OLMoE, tp 2, full": at(2, OLMOE, FULL, tp=2),
            "one key head, tp 2": at(2, model(num_key_value_heads=1), tp=2),
            "Phi-3, tp 2, Muon": at(2, model(model_type="phi3", pad_token_id=0), MUON, tp=2),
            "Cohere, tp 2, chunked loss": at(3, COHERE, CHUNKED, tp=2),
        },
        ("deepspeed", 2): {
            "GPT-2, bf16": at(1, GPT2, BF16, pp=2),
            "OLMoE": at(0, OLMOE, pp=2),
            "Gemma 2": at(1, GEMMA2, tier=CI, pp=2),
            "Cohere, chunked loss": at(1, COHERE, CHUNKED, pp=2),
            "Gemma 3n, full": at(1, GEMMA3N, FULL, pp=2),
            "GPT-2, tp 2": at(1, GPT2, tp=2),
            "DeepSeek-V3, tp 2": at(1, DEEPSEEK, tp=2),
        },
    },
    "derived stages and shards": {
        ("torch", 2): {"GPT-2, tp 2, compiled": at(2, AOT, GPT2, tp=2)},
        ("torch", 4): {
            "GPT-2, pp 2 x tp 2": at(2, GPT2, pp=2, tp=2),
            "GPT-2, tp 2 x cp 2, ring": at(3, RING, GPT2, tp=2, cp=2),
            "DeepSeek-V3, tp 2 x ep 2": at(2, DEEPSEEK, tp=2, ep=2),
        },
        ("deepspeed", 4): {"GPT-2, pp 2 x tp 2": at(1, GPT2, pp=2, tp=2)},
    },
    "fp8": {  # every recipe and every kind of layout in CI
        ("torch", 2): {
            "tensorwise": at(3, fp8("tensorwise"), tier=ALWAYS),
            "rowwise, selective, compiled": at(2, fp8("rowwise"), SELECTIVE, AOT, tier=CI),
            "rowwise, selective": at(3, fp8("rowwise"), SELECTIVE),
            "mxfp8, full, compiled": at(3, fp8("mxfp8"), FULL, AOT),
            "tp 2, tensorwise, full, compiled": at(3, fp8("tensorwise"), FULL, AOT, tp=2),
            "tensorwise, gathered": at(3, fp8("tensorwise", gather=True)),
            "tensorwise, gathered once, full, compiled": at(2, fp8("tensorwise", gather=True), FULL, AOT, tier=CI),
            "tp 2, mxfp8": at(0, fp8("mxfp8"), tier=CI, tp=2),
            "cp 2, rowwise_with_gw_hp": at(2, fp8("rowwise_with_gw_hp"), tier=CI, cp=2),
            "ep 2, rowwise": at(3, fp8("rowwise"), MOE, tier=ALWAYS, ep=2),
            "tensorwise, experts, selective": at(3, fp8("tensorwise"), MOE, SELECTIVE),
            "rowwise, experts, full, compiled": at(2, fp8("rowwise"), MOE, FULL, AOT),
            "pp 2, tensorwise": at(2, ZERO_BUBBLE, fp8("tensorwise"), tier=CI, pp=2),
        },
        ("torch", 4): {
            "tp 2, ep 2, rowwise": at(3, fp8("rowwise"), MOE, tp=2, ep=2),
            "dp 2, tp 2, tensorwise, gathered": at(3, fp8("tensorwise", gather=True), tp=2),
            "hybrid, tensorwise, gathered": at(3, fp8("tensorwise", gather=True), tier=CI, hybrid_shard_size=2),
        },
        ("deepspeed", 2): {
            "stage 0, rowwise": at(0, fp8("rowwise")),
            "stage 1, tp 2, tensorwise": at(1, fp8("tensorwise"), tier=CI, tp=2),
            "stage 2, mxfp8": at(2, fp8("mxfp8")),
            "stage 3, tensorwise": at(3, fp8("tensorwise")),
            "stage 3, rowwise, full, compiled": at(3, fp8("rowwise"), FULL, AOT, tier=CI),
            "stage 3, rowwise, experts": at(3, fp8("rowwise"), MOE, tier=CI),
            "stage 1, ep 2, tensorwise": at(1, fp8("tensorwise"), MOE, ep=2),
            "stage 1, pp 2, rowwise_with_gw_hp": at(1, fp8("rowwise_with_gw_hp"), tier=CI, pp=2),
        },
    },
    "uneven shares": {  # "auto": other shares in every step
        ("torch", 2): {
            "DDP": at(0, shares=[3, 1]),
            "DDP, micro-batches of different size": at(0, tier=CI, micro=4, shares=[3, 1]),
            "DDP, auto": at(0, micro=2, shares="auto"),
            "FSDP2 stage 2": at(2, micro=4, shares=[3, 1]),
            "FSDP2 stage 3": at(3, micro=4, shares=[3, 1]),
            "FSDP2 stage 3, auto": at(3, tier=CI, micro=4, shares="auto"),
            "experts": at(3, MOE, micro=4, shares=[3, 1]),
            "bf16": at(3, BF16, micro=4, shares=[3, 1]),
        },
        ("torch", 3): {
            "DDP": at(0, micro=2, shares=[2, 1, 1]),
            "FSDP2 stage 2": at(2, micro=2, shares=[2, 1, 1]),
            "FSDP2 stage 3": at(3, micro=4, shares=[2, 1, 1]),
            "8 samples on 3 ranks": at(3, micro=4, shares=[1, 1, 1]),
        },
        ("torch", 4): {
            "HSDP 2 x 2": at(3, micro=4, shares=[3, 2, 2, 1], hybrid_shard_size=2),
            "dp 2 x tp 2": at(3, micro=4, shares=[3, 1], tp=2),
            "dp 2 x cp 2": at(2, micro=4, shares=[3, 1], cp=2),
            "dp 2 x cp 2, ring": at(0, RING, shares=[3, 1], cp=2),
            "pp 2 x dp 2": at(0, shares=[3, 1], pp=2),
            "pp 2 x dp 2, stage 2, auto": at(2, shares="auto", pp=2),
            "pp 2 x dp 2, interleaved": at(2, INTERLEAVED, shares=[3, 1], pp=2),
        },
        ("deepspeed", 2): {
            "stage 0": at(0, micro=4, shares=[3, 1]),
            "stage 1": at(1, micro=4, shares=[3, 1]),
            "stage 2": at(2, micro=4, shares=[3, 1]),
            "stage 3": at(3, tier=CI, micro=4, shares=[3, 1]),
            "stage 1, whole micro-batches": at(1, shares=[3, 1]),
            "stage 1, auto": at(1, tier=CI, micro=2, shares="auto"),
            "stage 2, auto": at(2, micro=4, shares="auto"),
            "stage 3, auto": at(3, micro=4, shares="auto"),
            "stage 2 in fp32, clipped": at(2, CLIPPED, micro=4, shares=[3, 1]),
        },
        ("deepspeed", 4): {
            "stage 1, dp 2 x tp 2": at(1, micro=2, shares=[3, 1], tp=2),
            "stage 1, pp 2 x dp 2": at(1, tier=CI, shares=[3, 1], pp=2),
            "stage 0, pp 2 x dp 2, auto": at(0, shares="auto", pp=2),
        },
    },
    "recurrent blocks": {  # documents apart, one or two heads of each rank
        ("torch", 2): {
            "cp 2, ring, full, kimi_linear": at(2, family("kimi_linear"), MASKED, RING, FULL, cp=2),
            "cp 2, ring, lfm2": at(3, family("lfm2"), MASKED, RING, tier=CI, cp=2),
            "cp 2, whole, jamba": at(3, family("jamba"), MASKED, cp=2),
            "cp 2, whole, zaya": at(3, family("zaya"), MASKED, cp=2),
            "stage 3, mamba2": at(3, family("mamba2"), MASKED, SELECTIVE),
            "tp 2, lfm2, selective": at(0, family("lfm2"), MASKED, SELECTIVE, tp=2),
            "pp 2, bamba": at(0, family("bamba"), MASKED, FULL, pp=2),
            "compiled, cp 2, bamba": at(3, family("bamba"), MASKED, FULL, AOT, cp=2),
        },
        ("torch", 4): {"cp 2, tp 2, ring, bamba": at(3, family("bamba"), MASKED, RING, cp=2, tp=2)},
        ("deepspeed", 2): {
            "stage 1, tp 2, bamba": at(1, family("bamba"), MASKED, tier=CI, tp=2),
            "stage 3, cp 2, kimi_linear": at(3, SMALL, family("kimi_linear"), MASKED, FULL, cp=2),
            "stage 2, cp 2, ring, nemotron_h": at(2, family("nemotron_h"), MASKED, RING, cp=2),
            "stage 1, cp 2, falcon_h1": at(1, family("falcon_h1"), MASKED, cp=2),
            "stage 3, bamba": at(3, SMALL, family("bamba"), MASKED),
            "stage 0, tp 2, qwen3_next": at(0, family("qwen3_next"), MASKED, tp=2),
        },
    },
    "padding": {  # three data ranks for 8 samples: in the last micro-batch of rank 2 no row has a target
        ("torch", 3): {
            "whole weights": at(0, ELASTIC),
            "gathered per step, smaller micro-batch, chunked loss": at(2, ELASTIC, CHUNKED, Z_LOSS, tier=CI, micro=2),
            "gathered per layer, clipped": at(3, ELASTIC, CLIPPED),
            "experts": at(3, ELASTIC, MOE),
        },
        ("torch", 6): {
            "1f1b": at(3, ELASTIC, pp=2),
            # 2 micro-batches in a round: 4 of 12 rows are padding
            "interleaved": at(2, INTERLEAVED, ELASTIC, tier=CI, pp=2),
        },
        ("deepspeed", 3): {
            "stage 2, smaller micro-batch, chunked loss": at(2, ELASTIC, CHUNKED, Z_LOSS, micro=2),
            "stage 3, clipped": at(3, ELASTIC, SMALL, CLIPPED),
            "stage 3, experts": at(3, ELASTIC, SMALL, MOE),
        },
        ("deepspeed", 6): {"pp 2": at(1, ELASTIC, pp=2)},
    },
}

CELLS = {
    f"{subject}, {engine} on {processes}: {name}": Cell(subject, engine, processes, keys, tier)
    for subject, groups in TABLE.items()
    for (engine, processes), cells in groups.items()
    for name, (tier, keys) in cells.items()
}
