"""AdamW: torch's, or ours with small moments."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.config.sections.optimizers import OptimizerParams
from pipeline.engines.optim.small_moments import AdamWSmallMoments

_DTYPES = {"bf16": torch.bfloat16, "8bit": torch.uint8}
"""`moments_dtype` -> dtype of the state tensors."""


def build(groups: list[dict[str, Any]], params: OptimizerParams, *, lr: float, fused: bool) -> torch.optim.Optimizer:
    """Builds AdamW from parameter groups; small moments have no fused kernel."""
    assert params.betas is not None
    assert params.eps is not None
    if params.moments_dtype is not None:
        dtype = _DTYPES[params.moments_dtype]
        return AdamWSmallMoments(groups, lr=lr, betas=params.betas, eps=params.eps, moments_dtype=dtype)
    return torch.optim.AdamW(groups, lr=lr, betas=params.betas, eps=params.eps, fused=fused or None)
