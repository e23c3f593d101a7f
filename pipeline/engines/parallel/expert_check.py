"""Pre-flight check of `moe.balance`: whether the architecture's routers can be observed and balanced, on a tiny model.

It takes a fraction of a second, on the CPU, before the process group is initialized.

Shapes: B = 1, T = 16 positions, V = 32 ids.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from headrace.base.errors import ConfigError
from pipeline.config.sections.run import MoeSection
from pipeline.engines.parallel.expert_balance import make_balancer
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from pipeline.models.hf_config import one_line
from pipeline.models.resize.shrink import shrink
from pipeline.models.routers import find_routers, has_experts

_V, _T = 32, 16


def check_experts(section: MoeSection, model: nn.Module) -> None:
    """Checks that `moe.balance` works for the model's architecture.

    Args:
        section: the config's `moe`.
        model: the full model, on meta.

    Raises:
        ConfigError: the model has no experts, no router that can be observed, or no correction bias.
    """
    balance, config = section.balance, model.config
    assert isinstance(config, PretrainedConfig)
    if balance == "none":
        return
    routers, kind = find_routers(model), config.model_type
    if not routers:
        why = (
            f"{kind} has no router of experts that transformers names"
            if has_experts(config.to_dict())
            else "it has no experts"
        )
        raise ConfigError("moe.balance", balance, why=why, remedy="remove it, or use another architecture")
    if balance == "bias" and any(router.bias_owner is None for router in routers):
        why = f"the routers of {kind} have no correction bias (a buffer e_score_correction_bias)"
        raise ConfigError("moe.balance", balance, why=why, remedy="use aux_loss")
    if len({router.experts for router in routers}) > 1:
        why = f"layers of {kind} have different numbers of experts"
        raise ConfigError("moe.balance", balance, why=why, remedy="use none")
    failure = _failure(section, config)
    if failure is not None:
        why = f"the routers of {kind} cannot be balanced from outside: {failure}"
        raise ConfigError("moe.balance", balance, why=why, remedy="use none, or another architecture")


def _failure(section: MoeSection, config: PretrainedConfig) -> str | None:
    """Returns why a step of a tiny model does not count its tokens once per layer, or does not reach its routers; None
    if it does."""
    try:
        tiny: Any = build_meta(
            shrink(config, divide=1, layers=2, vocab_size=_V), dtype=torch.float32, attn_implementation="eager"
        )
        materialize(tiny, InitByName(tiny, seed=0), device=torch.device("cpu"))
        balancer = make_balancer(section, tiny, device=torch.device("cpu"))
        if balancer is None:
            return "a tiny model of this architecture has none"
        balancer.attach(tiny.train())
        balancer.begin_step(1.0)
        balancer.begin_micro_batch(torch.ones(1, _T, dtype=torch.bool))
        logits = tiny(input_ids=torch.arange(_T)[None] % _V, use_cache=False).logits
        logits.sum().backward()
        if not balancer.observed:
            return "they return no logits, weights and indices of the chosen experts"
    except ConfigError:
        raise
    except Exception as error:  # each architecture computes in its own way
        return one_line(error)
    return None
