"""AdamW parameter groups, master weights, optimizer state and the non-finite check, shared by all engines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import TrainingError
from pipeline.config.deepspeed_schema import OptimizerParams
from pipeline.config.schema import Config
from pipeline.engines.base import StepOutcome, StepResult

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state per parameter, as torch names it."""


def model_dtype(config: Config) -> torch.dtype:
    """The dtype of forward and backward passes: bf16 or fp16 when the config enables it, else fp32."""
    if config.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled else torch.float32


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: matrices, not vectors (norms and biases).

    Call it while the model is on meta: a sharded parameter no longer has its full shape.
    """
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}


def weight_decay_groups(
    parameters: Mapping[str, Tensor], decayed: set[str], *, weight_decay: float
) -> list[dict[str, Any]]:
    """AdamW's two parameter groups, with and without weight decay, in the model's order, from parameters by name."""
    return [
        {"params": [p for name, p in parameters.items() if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters.items() if name not in decayed], "weight_decay": 0.0},
    ]


def make_adamw(groups: Iterable[dict[str, Any]], params: OptimizerParams) -> torch.optim.AdamW:
    """AdamW at learning rate 0: the loop sets the rate of each step. Fused: seven times as fast on a CPU.

    The rate must be 0: DeepSpeed makes a dummy step with zero gradients to allocate optimizer state, and only at rate 0
    does weight decay leave the weights unchanged in it.
    """
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=params.betas,
        eps=params.eps,
        fused=True,
    )


def raise_if_non_finite(step: int, name: str, value: float) -> None:
    """Raises TrainingError unless `value` is finite."""
    if not math.isfinite(value):
        raise TrainingError(
            f"step {step}: the {name} is {value}\n"
            f"  the last checkpoint is untouched; try: a lower optimizer.params.lr, gradient_clipping 1.0, a longer"
            f" warm-up, or inspect the samples of this step"
        )


def require_finite_step(step: int, result: StepResult) -> StepResult:
    """Returns the result, for callers that do not handle non-finite steps by skip or rollback.

    Raises:
        TrainingError: the step was not applied, because its loss or its gradient norm is not finite.
    """
    if result.outcome is StepOutcome.NON_FINITE:
        raise_if_non_finite(step, "loss", result.loss)
        raise_if_non_finite(step, "gradient norm", result.grad_norm)
    return result


@torch.no_grad()
def ensure_adamw_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of one parameter; created as torch does at the first step if it does not exist yet."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    for key in MOMENTS:
        if key not in state:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if "step" not in state:
        on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    return state


def master_weight(weight: nn.Parameter) -> nn.Parameter:
    """The fp32 master weight that the optimizer updates: a copy of a bf16 or fp16 weight, or the fp32 weight itself."""
    return weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
