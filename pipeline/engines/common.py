"""Update scales of parameters, master weights and the non-finite check, shared by all engines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from foundation.errors import ConfigError, TrainingError
from pipeline.config.sections.optimizers import OptimizerSection, UpdateScope
from pipeline.config.sections.run import Config, ModelSection
from pipeline.engines.base import StepMeasure, StepOutcome, StepResult
from pipeline.engines.optim.groups import DECAYED, NOT_DECAYED, UpdateScale
from pipeline.engines.parametrization.scales import find_parametrization
from pipeline.models.decayed import is_decayed
from pipeline.models.hidden_matrices import MatrixForm, hidden_matrices


def model_dtype(config: Config) -> torch.dtype:
    """Returns the dtype of forward and backward passes: bf16 or fp16 if the config enables it, else fp32."""
    if config.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled else torch.float32


def samples_text(config: Config) -> bool:
    """Whether a step's batch is generated with the weights after the previous step (on-policy distillation)."""
    return config.distill is not None and config.distill.on_policy is not None


def update_scales(
    model: nn.Module, section: ModelSection | None = None, optimizer: OptimizerSection | None = None
) -> dict[str, UpdateScale]:
    """Returns the update scale of every parameter: weight decay applies to matrices, not to norms and biases.

    Parameters that a module marks `_no_weight_decay`, and state-space layers' decay rates and skips, do not decay.

    Must be called while the model is whole and on meta: a sharded parameter no longer has its full shape.

    Args:
        model: built by `build_meta`, or a user's own.
        section: the config's `model`, whose parametrization may scale the learning rate; None for a user's own model.
        optimizer: the config's `optimizer`, which may treat some parameters as hidden matrices; None if it does not.
    """
    matrices = {} if optimizer is None else matrices_of(model, optimizer)
    found = None if section is None else find_parametrization(section, model, optimizer)
    decayed = {name: is_decayed(model, name, parameter) for name, parameter in model.named_parameters()}
    scales = {
        name: (DECAYED if each else NOT_DECAYED) if found is None else found.update_scale(name, decayed=each)
        for name, each in decayed.items()
    }
    return {name: replace(scale, matrix=name in matrices) for name, scale in scales.items()}


def matrices_of(model: nn.Module, optimizer: OptimizerSection) -> dict[str, MatrixForm]:
    """Returns the parameters that Muon treats as hidden matrices; none for other optimizers. Needs a whole model.

    Raises:
        ConfigError: the model has no hidden matrices.
    """
    if optimizer.kind.scope is not UpdateScope.MATRIX:
        return {}
    found = hidden_matrices(model)
    if not found:
        why = "no hidden matrix was found in this model: no linear layer within decoder layers, no stacked experts"
        raise ConfigError("optimizer.type", optimizer.type, why=why, remedy="use AdamW")
    return found


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


def with_measures(measures: Iterable[StepMeasure], result: StepResult, *, targets: int) -> StepResult:
    """Ends the step of all measures and adds their values to the result's parts. Collective."""
    parts = dict(result.parts)
    for each in measures:
        parts |= each.parts(each.end_step(targets=targets, vetoed=result.skipped).tolist())
    return replace(result, parts=parts)


def master_weight(weight: nn.Parameter) -> nn.Parameter:
    """Returns the fp32 master weight for the optimizer: a copy of a bf16 or fp16 weight, or the fp32 weight itself."""
    return weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
