"""Rules for the numbers of a mixture of experts in a Hugging Face config: experts, experts per token, groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from foundation.errors import ConfigError

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys for the number of experts."""
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""Keys for the number of experts per token."""
GROUPS = ("n_group", "num_expert_group")
"""Keys for the number of groups of experts; a token's experts are in `topk_group` of the groups."""
_IDLE = "zero_expert_num"
"""Key for the number of experts that compute nothing and may be chosen, too (LongCat-Flash)."""


def expert_sections(model: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the parts of a config that have a number of experts, by prefix: `ffn_config.` in DBRX."""
    inside = ((f"{key}.", each) for key, each in model.items() if isinstance(each, dict))
    yield from ((prefix, each) for prefix, each in [("", model), *inside] if _count(each, EXPERTS)[1])


def experts_of(model: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of experts and of experts per token; (0, 0) for a dense model."""
    for _, section in expert_sections(model):
        return _count(section, EXPERTS)[1], _count(section, CHOSEN)[1]
    return 0, 0


def check_experts(model: Mapping[str, Any]) -> None:
    """Checks numbers of experts against one another, also where they are in a section of their own.

    Raises:
        ConfigError: a token has more experts than there are, or groups do not divide the experts.
    """
    for prefix, section in expert_sections(model):
        (key, experts), (chosen_key, chosen) = _count(section, EXPERTS), _count(section, CHOSEN)
        idle = _count(section, (_IDLE,))[1]
        if chosen > experts + idle:
            why = f"a token cannot go to {chosen} of {experts + idle} experts ({key})"
            raise _refusal(prefix + chosen_key, chosen, why, f"use at most {experts + idle}")
        (group_key, groups), (limit_key, limit) = _count(section, GROUPS), _count(section, ("topk_group",))
        if groups > 1 and experts % groups:
            near = max(n for n in range(1, min(groups, experts) + 1) if experts % n == 0)
            why = f"{experts} experts ({key}) are not divisible by it"
            raise _refusal(prefix + group_key, groups, why, f"use {near}")
        if groups > 1 and limit > groups:
            why = f"there are {groups} groups of experts ({group_key})"
            raise _refusal(prefix + limit_key, limit, why, f"use at most {groups}")
        within = limit * experts // groups if groups > 1 and limit else chosen
        if chosen > within:
            why = f"the experts of a token are in {limit} of {groups} groups, which have {within}"
            raise _refusal(prefix + chosen_key, chosen, why, f"use at most {within}, or a larger {limit_key}")


def _count(section: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, int]:
    """Returns the first of the keys that has a number above 0, and the number."""
    found = ((key, section.get(key)) for key in keys)
    return next(((k, n) for k, n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0), (keys[0], 0))


def _refusal(field: str, value: int, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"model.config.{field}", value, why=why, remedy=remedy)
