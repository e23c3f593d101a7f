"""Builds the torch optimizer of an `optimizer` section. The same objects run on both engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pipeline.config.sections.deepspeed import OptimizerSection
from pipeline.config.sections.optimizers import UpdateScope
from pipeline.engines.optim.lion import Lion
from pipeline.engines.optim.small_moments import AdamWSmallMoments

_DTYPES = {"bf16": torch.bfloat16, "8bit": torch.uint8}
"""`moments_dtype` -> that of the state tensors."""


def build_optimizer(
    groups: Iterable[dict[str, Any]], section: OptimizerSection, *, lr: float = 0.0, fused: bool = True
) -> torch.optim.Optimizer:
    """The optimizer, fused where torch has a fused kernel: AdamW is seven times as fast on a CPU.

    At learning rate 0 by default: the loop sets the rate of each step. DeepSpeed makes a dummy step with zero gradients
    to allocate optimizer state, and only at rate 0 does weight decay leave the weights unchanged in it.

    Args:
        groups: parameter groups with their `weight_decay`; those without parameters are left out.
        section: the config's `optimizer`.
        lr: learning rate of all groups.
        fused: use torch's fused kernels. They need `ensure_all_states` before a step without some of the gradients.
    """
    # every engine hands over pieces of parameters in some of its layouts
    assert section.kind.scope is UpdateScope.ELEMENT, "see docs/decisions/0015-optimizers.md"
    params, filled = section.params, [group for group in groups if group["params"]]
    if section.type == "Lion":
        assert params.betas is not None
        return Lion(filled, lr=lr, betas=params.betas)
    if section.type == "SGD":
        momentum, nesterov = params.momentum or 0.0, bool(params.nesterov)
        return torch.optim.SGD(filled, lr=lr, momentum=momentum, nesterov=nesterov, fused=fused or None)
    assert params.betas is not None
    assert params.eps is not None
    if params.moments_dtype is not None:
        return AdamWSmallMoments(
            filled, lr=lr, betas=params.betas, eps=params.eps, moments_dtype=_DTYPES[params.moments_dtype]
        )
    return torch.optim.AdamW(filled, lr=lr, betas=params.betas, eps=params.eps, fused=fused or None)
