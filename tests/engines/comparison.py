"""Tolerances of comparisons with one process; layouts, and the models of their tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

FP32 = 1e-5
"""Relative, on losses and gradients: fp32 rounds at 6e-8, and few additions in another order stay far below this."""

HALF = {"bf16": 2e-3, "fp16": 5e-4}
"""Relative, on losses: half a unit of the type's last place (2^-8, 2^-11), on a few steps."""

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_RANKS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 4}
_GROUPS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {**_RANKS, **_GROUPS, "moe_intermediate_size": 24}
"""Sizes of a DeepSeek-V3: latent attention and grouped experts."""


def layout(stage: int, *, zero: Mapping[str, Any] | None = None, micro: int = 1, **keys: Any) -> dict[str, Any]:
    """A layout: the ZeRO stage, further keys of that section, and other config keys that differ from the reference."""
    return {"zero_optimization": {"stage": stage, **(zero or {})}, "train_micro_batch_size_per_gpu": micro, **keys}


def layout_params(always: set[str], *layouts: Mapping[str, Any], integration: Collection[str] = ()) -> list[Any]:
    """The layouts' names as test parameters: those of `always` for `make test`, others for the tier of their marker."""
    names = [name for each in layouts for name in each if name not in always]
    marks = {name: pytest.mark.integration if name in integration else pytest.mark.sweep for name in names}
    return [*sorted(always), *(pytest.param(name, marks=mark) for name, mark in marks.items())]
