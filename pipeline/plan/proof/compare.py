"""Compares two runs of one config: gradients of the first step, losses and gradient norms of every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foundation.section import parse
from pipeline.checkpoint import named_state
from pipeline.checkpoint.export.read_weights import CheckpointWeights
from pipeline.checkpoint.format.metadata import read_metadata
from pipeline.config.schedule import make_schedule
from pipeline.config.sections.deepspeed import SchedulerSection
from pipeline.config.sections.optimizers import OptimizerKind, OptimizerSection, UpdateScope
from pipeline.plan.proof.case import Case, CaseResult
from pipeline.plan.proof.tolerance import Tolerance

RESUMED = "loss, resumed"
"""Name of the loss comparison after resuming from another layout's state."""

NEGLIGIBLE = 1e-3
"""A tensor whose gradient is below this share of the average (root mean square) is compared relative to that share: a
gradient that is zero but for rounding (e.g. of a key's bias before a softmax) has no significant digits."""


@dataclass(frozen=True)
class Comparison:
    """The largest difference of one quantity, and its tolerance.

    Attributes:
        quantity: loss, RESUMED, gradient norm, held-out loss or gradient.
        difference: relative difference at the location.
        tolerance: allowed difference at the location.
        location: step or tensor with the largest difference.
    """

    quantity: str
    difference: float
    tolerance: float
    location: str

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.difference <= self.tolerance


def first_gradient(case: Case, result: CaseResult) -> dict[str, Tensor]:
    """The gradient of the first step by tensor, fp32, before clipping.

    After one step the first state is (1 - beta) times the clipped gradient. beta is AdamW's first, Lion's second, and
    the momentum of Muon's matrices. With beta 0 the state is the gradient. SGD's momentum is the clipped gradient plus
    the weight decay. The clipping factor follows from the norm. Elements that the state lacks are NaN.
    """
    directory = result.state(1)
    shapes = CheckpointWeights(directory).shapes
    section = parse(OptimizerSection, case.config["optimizer"])
    clip = case.config.get("gradient_clipping") or math.inf
    factor = min(1.0, clip / (result.grad_norms[1] + 1e-6))
    stored = {each.key for each in read_metadata(directory).tensors}
    found: dict[str, Tensor] = {}
    for kind in filter(None, (section.kind, section.kind.rest)):
        # in Muon some parameters have the state of one kind, others that of the other kind
        own = {name: s for name, s in shapes.items() if named_state.moment_key(kind.states[0], name) in stored}
        found |= {name: state / _share(section, kind) for name, state in _read(kind.states[0], own, directory).items()}
    if section.kind.l2_decay:
        weights = _read("weight", shapes, directory)
        found = {name: state - _decay_within(case, section, weights[name], state) for name, state in found.items()}
    return {name: found[name] / factor for name in shapes}


def _share(section: OptimizerSection, kind: OptimizerKind) -> float:
    """The factor of a gradient in the first state of a kind."""
    if kind.scope is UpdateScope.MATRIX:
        return 1 - (section.params.momentum or 0.0)
    betas = section.params.betas
    return 1.0 if kind.state_beta is None or betas is None else 1 - betas[kind.state_beta]


def _decay_within(case: Case, section: OptimizerSection, weight: Tensor, momentum: Tensor) -> Tensor | float:
    """The L2 weight decay in the momentum after the first step, found by undoing the update of the weight."""
    if momentum.ndim < 2:
        return 0.0
    params, scheduler = section.params, case.config.get("scheduler")
    parsed = None if scheduler is None else parse(SchedulerSection, scheduler)
    lr = make_schedule(parsed, lr=params.lr, steps=case.config["run"]["steps"]).lr(1)
    update = momentum * (1 + (params.momentum or 0.0) * bool(params.nesterov))
    return params.weight_decay * (weight + lr * update)


def _read(kind: str, shapes: Mapping[str, torch.Size], directory: Path) -> dict[str, Tensor]:
    state = {named_state.moment_key(kind, name): torch.full(shape, math.nan) for name, shape in shapes.items()}
    named_state.read(state, directory)
    return {key.removeprefix(named_state.moment_key(kind, "")): value for key, value in state.items()}


def relative_differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Tensor -> ||found - expected|| / ||expected||; infinite where either lacks the tensor."""
    total = math.sqrt(sum(float(e.double().square().sum()) for e in expected.values()))
    average = total / math.sqrt(sum(e.numel() for e in expected.values()))
    relative: dict[str, float] = {}
    for name in sorted({*found, *expected}):
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            relative[name] = math.inf
            continue
        size = max(float(expected[name].double().norm()), NEGLIGIBLE * average * math.sqrt(expected[name].numel()))
        difference = float((found[name].double() - expected[name].double()).norm())
        relative[name] = difference / size if math.isfinite(difference) else math.inf
    return relative


def compare(
    found: CaseResult, expected: CaseResult, gradient: Mapping[str, float], tolerance: Tolerance
) -> list[Comparison]:
    """The largest difference of every quantity.

    Args:
        found: result of a layout.
        expected: result of the reference.
        gradient: tensor -> relative difference of its first gradient, from `relative_differences`.
        tolerance: allowed differences.
    """
    steps = sorted(set(found.losses) & set(expected.losses))
    comparisons = [
        largest_difference(
            "loss", {f"step {s}": _difference(found.losses, expected.losses, s) for s in steps}, tolerance.loss
        )
    ]
    if found.resumed_losses:
        resumed = {f"step {s}": _difference(found.resumed_losses, expected.losses, s) for s in found.resumed_losses}
        comparisons.append(largest_difference(RESUMED, resumed, tolerance.loss))
    compared = [s for s in steps if tolerance.norm_steps is None or s <= tolerance.norm_steps]
    if compared:
        norms = {f"step {s}": _difference(found.grad_norms, expected.grad_norms, s) for s in compared}
        comparisons.append(largest_difference("gradient norm", norms, tolerance.norm))
    if found.heldout_loss is not None and expected.heldout_loss is not None:
        difference = abs(found.heldout_loss - expected.heldout_loss) / expected.heldout_loss
        comparisons.append(Comparison("held-out loss", difference, tolerance.loss, "the end"))
    if gradient:
        shares = {name: value / tolerance.gradient.get(name, 1.0) for name, value in gradient.items()}
        name = max(shares, key=lambda n: shares[n])
        comparisons.append(Comparison("gradient", gradient[name], tolerance.gradient.get(name, 1.0), name))
    return comparisons


def largest_difference(quantity: str, values: Mapping[str, float], tolerance: float) -> Comparison:
    """The largest of the differences by location."""
    location = max(values, key=lambda key: values[key])
    return Comparison(quantity, values[location], tolerance, location)


def _difference(found: Mapping[int, float], expected: Mapping[int, float], step: int) -> float:
    difference = abs(found[step] - expected[step]) / abs(expected[step])
    return difference if math.isfinite(difference) else math.inf
