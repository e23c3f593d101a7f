"""Shrinks a mixture of experts: numbers of experts, of experts per token and of groups; layers without experts."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.rules.experts import CHOSEN, EXPERTS, GROUPS
from pipeline.models.folder.weight_files import HfFields

DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Keys for the number of layers without experts at the beginning."""
_PERIODS = (
    *("decoder_sparse_step", "expert_layer_period", "moe_layer_interval", "moe_layer_freq"),
    "interleave_moe_layer_step",
)
"""Keys for the period, in layers, at which layers have experts."""


def few_experts(given: HfFields) -> dict[str, int]:
    """Returns keys for four experts, two per token; if groups are chosen first, for two groups of four experts."""
    chosen = {key: min(given[key], 2) for key in CHOSEN if given.get(key)}
    groups = max(given.get(key) or 1 for key in GROUPS)
    if groups == 1:
        return chosen | {key: min(given[key], 4) for key in EXPERTS if given.get(key)}
    few = {key: 2 for key in GROUPS if given.get(key)}
    few |= {"topk_group": 1 if (given.get("topk_group") or groups) < groups else 2}
    return chosen | few | {key: min(given[key] // 2 * 2, 8) for key in EXPERTS if given.get(key)}


def with_experts_inside(given: HfFields) -> Iterator[tuple[str, HfFields]]:
    """Yields sections of a config that contain the number of experts, by key, e.g. `ffn_config` in DBRX."""
    return (
        (key, each) for key, each in given.items() if isinstance(each, dict) and not each.keys().isdisjoint(EXPERTS)
    )


def depth_with_experts(given: HfFields, total: int) -> int:
    """Layers up to the first with experts, keeping one dense layer if dense layers come first; 0 without experts."""
    period = max([1, *(given[key] for key in _PERIODS if isinstance(given.get(key), int))])
    dense, without = any(given.get(key) for key in DENSE_FIRST), given.get("mlp_only_layers") or []
    return next((layer + 1 for layer in range(dense + period - 1, total, period) if layer not in without), 0)
