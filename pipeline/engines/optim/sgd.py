"""SGD: torch's, with or without momentum."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.config.sections.optimizers import OptimizerParams


def build(groups: list[dict[str, Any]], params: OptimizerParams, *, lr: float, fused: bool) -> torch.optim.Optimizer:
    """Builds SGD from parameter groups."""
    momentum, nesterov = params.momentum or 0.0, bool(params.nesterov)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=fused or None)
