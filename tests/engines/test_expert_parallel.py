"""Laws 3 and 4 with expert parallelism: layouts match one process, and states are exchanged with it, whatever ep is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.comparison import (
    EXPERTS,
    LATENT,
    assert_within_tolerance,
    differences_fixture,
    layout,
    layout_params,
)


def ep(size: int, stage: int = 3, *, model: Any = None, zero: Any = None, more: Any = None, **keys: Any) -> Any:
    return layout(stage, zero=zero, model=model or EXPERTS, parallel={"ep": size, **keys}, **(more or {}))


DEEPSEEK = {
    **LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "v_head_dim": 8,
    "tie_word_embeddings": False,
}
DENSE_FIRST = {**DEEPSEEK, "num_hidden_layers": 4, "first_k_dense_replace": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek v3": DEEPSEEK,
    "glm4 moe": {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 8,
    },
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}

TWO_EXPERTS = {**EXPERTS, "num_experts": 2, "num_experts_per_tok": 1}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 3e-3, "weight_decay": 0.1}}}

BESIDE = {"ep_overlap": True}
FULL, SELECTIVE = ({"memory": {"activation_checkpointing": mode}} for mode in ("full", "selective"))
COMPILED = {"compile": {"enabled": True, "backend": "aot_eager"}}

TORCH_TWO = {
    "ep 2, selective activation checkpointing": ep(2, more=SELECTIVE),
    "ep 2, overlapped, unsharded": ep(2, 0, **BESIDE),
    "ep 2, overlapped, cp 2": ep(2, 2, cp=2, **BESIDE),
    "ep 2, overlapped, tp 2": ep(2, 2, tp=2, **BESIDE),
    "ep 2, overlapped, compiled": ep(2, 2, more={**COMPILED, **FULL}, **BESIDE),
    "ep 2, overlapped, balanced, full": ep(2, 2, more={**FULL, "moe": {"balance": "aux_loss"}}, **BESIDE),
    "ep 2, deepseek v3, selective": ep(2, 2, model=DEEPSEEK, more=SELECTIVE),
    "ep 2, overlapped, deepseek v3, selective": ep(2, 2, model=DEEPSEEK, more=SELECTIVE, **BESIDE),
    "ep 2, overlapped, selective": ep(2, 2, more=SELECTIVE, **BESIDE),
    "ep 2, balanced": ep(2, more={"moe": {"balance": "aux_loss", "aux_loss_coef": 0.1}}),
    **{f"ep 2, {name}": ep(2, model=model) for name, model in FAMILIES.items()},
    "ep 2, gpt oss, biases": ep(2, model=GPT_OSS, more={"attn_implementation": "eager"}),
}
TORCH_FOUR = {
    "ep 2 x edp 2": ep(2),
    "ep 4, more ranks than rows of tp": ep(4, tp=2),
    "ep 2, tp 2, hybrid sharding": ep(2, tp=2, hybrid_shard_size=1),
    "ep 2 x edp 2, overlapped": ep(2, 2, **BESIDE),
    "ep 2, overlapped, hybrid sharding 2 x 2": ep(2, 2, hybrid_shard_size=2, **BESIDE),
    "ep 2, pp 2, 1f1b": ep(2, pp=2),
    "ep 2, pp 2, dualpipev": ep(2, 2, pp=2, schedule="dualpipev"),
    "ep 2, pp 2, dualpipev, overlapped": ep(2, 2, pp=2, schedule="dualpipev", **BESIDE),
    "ep 2, pp 2, dualpipev, overlapped, mixtral, full": ep(
        2, 0, pp=2, schedule="dualpipev", model=FAMILIES["mixtral"], more=FULL, **BESIDE
    ),
    "ep 2, Muon, edp 2 over 1 expert each": ep(2, model=TWO_EXPERTS, more=MUON),
    "ep 2 x edp 2, Muon": ep(2, more=MUON),
    "ep 2, Muon, pp 2, tp 2": ep(2, 2, pp=2, tp=2, more=MUON),
    "ep 2, edp 2 over 1 expert each": ep(2, model=TWO_EXPERTS),
}
CLIPPED, BF16 = {"gradient_clipping": 0.1}, {"bf16": {"enabled": True}}
ON_THE_CPU = {"device": "cpu"}
# every parameter is partitioned, and buckets are filled more than once
SMALL = {"stage3_param_persistence_threshold": 0, "sub_group_size": 4096, "reduce_bucket_size": 4096}
BALANCED = {"memory": {"activation_checkpointing": "full"}, "moe": {"balance": "aux_loss", "aux_loss_coef": 0.1}}

ZERO_TWO = {
    # gradients overflow at the initial scale
    "zero 0, ep 2, fp16": ep(2, 0, more={"fp16": {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}}),
    "zero 1, ep 2, optimizer on the cpu": ep(2, 1, zero={"offload_optimizer": ON_THE_CPU}, more=CLIPPED),
    "zero 2, ep 2, optimizer on the cpu": ep(2, 2, zero={"offload_optimizer": ON_THE_CPU}, more=CLIPPED),
    "zero 2, ep 2, gpt oss, biases": ep(2, 2, model=GPT_OSS, more={"attn_implementation": "eager"}),
    "zero 3, ep 2, optimizer and weights on the cpu": ep(
        2, zero={"offload_optimizer": ON_THE_CPU, "offload_param": ON_THE_CPU, **SMALL}, more=CLIPPED
    ),
    "zero 3, ep 2, bf16, reduced in bf16": ep(2, zero=SMALL, more={"communication_data_type": "bf16", **BF16}),
    "zero 3, ep 2, cp 2, compiled": ep(2, cp=2, more={"compile": {"enabled": True, "backend": "aot_eager"}}),
    "zero 3, ep 2, balanced, full activation checkpointing, 20 steps": {
        **ep(2, zero=SMALL, more=BALANCED),
        "steps": 20,
    },
}
ZERO_FOUR = {
    "zero 0, ep 2 x edp 2, clipped": ep(2, 0, more=CLIPPED),
    "zero 0, ep 2 x edp 2, Muon": ep(2, 0, more=MUON),
    "zero 1, ep 2 x edp 2, Muon": ep(2, 1, more=MUON),
    "zero 2, ep 2, tp 2": ep(2, 2, tp=2),
    "zero 3, ep 2 x edp 2, Muon": ep(2, zero=SMALL, more=MUON),
    "zero 0, ep 2, pp 2, dense first stage": ep(2, 0, pp=2, model=DENSE_FIRST),
    "zero 1, ep 2, pp 2, dense first stage": ep(2, 1, pp=2, model=DENSE_FIRST, more=CLIPPED),
}
ALWAYS = {
    "ep 2 x edp 2",
    "ep 2, pp 2, 1f1b",
    "zero 2, ep 2, tp 2",
}
"""The others run with `make sweep-tests`; overlapped exchanges in a pipeline: tests/parity."""

LAYOUTS = {"torch": {2: TORCH_TWO, 4: TORCH_FOUR}, "deepspeed": {2: ZERO_TWO, 4: ZERO_FOUR}}
found = differences_fixture("test_a_layout_follows_one_process", LAYOUTS, ALWAYS)


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", layout_params(ALWAYS, *(cases for each in LAYOUTS.values() for cases in each.values()))
)
def test_a_layout_follows_one_process(found: dict[str, dict[str, float]], name: str) -> None:
    assert_within_tolerance(found[name], name)


def test_the_rows_of_the_busiest_rank_are_reported(found: dict[str, dict[str, float]]) -> None:
    mean = 32 * 2  # positions of a micro-batch of one sample, each for two experts
    assert mean < found["ep 2 x edp 2"]["rows"] <= 2 * mean
