"""Two runs of one config side by side: gradient by gradient, loss by loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.checkpoint import named_state
from pipeline.proof.case import Case, CaseResult
from pipeline.proof.tolerance import Tolerance

RESUMED = "loss, resumed"
"""What a gap is called that compares steps from another layout's state."""

SMALL = 1e-3
"""A tensor whose gradient is below this share of the average (root mean square) is measured against that share: what is
zero but for rounding (a key's bias before a softmax) has no digits to compare."""


@dataclass(frozen=True)
class Gap:
    """The largest difference of one kind, as a share of its tolerance.

    Attributes:
        what: loss, RESUMED, gradient norm, held-out loss, gradient.
        difference: relative.
        tolerance: of that place.
        at: step or tensor.
    """

    what: str
    difference: float
    tolerance: float
    at: str

    @property
    def holds(self) -> bool:
        """Within the tolerance; a difference that is no number is not."""
        return self.difference <= self.tolerance

    @property
    def used(self) -> float:
        """Share of the tolerance that is used."""
        return self.difference / self.tolerance


def first_gradient(case: Case, outcome: CaseResult) -> dict[str, Tensor]:
    """Every tensor of the first step's gradient, fp32, before clipping.

    AdamW's first moment after one step is (1 - beta1) times the gradient it was given; with beta1 0 it is the
    gradient. Clipping multiplied it by a factor that follows from the norm. What a state leaves out is NaN.
    """
    directory = outcome.state(1)
    shapes = named_state.stored_shapes(directory)
    state = {named_state.moment_key("exp_avg", n): torch.full(s, math.nan) for n, s in shapes.items()}
    named_state.read(state, directory)
    params = case.config["optimizer"]["params"]
    clip = case.config.get("gradient_clipping") or math.inf
    factor = (1 - params["betas"][0]) * min(1.0, clip / (outcome.norms[1] + 1e-6))
    prefix = named_state.moment_key("exp_avg", "")
    return {key.removeprefix(prefix): moment / factor for key, moment in state.items()}


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Tensor -> ||found - expected|| / ||expected||; infinite where one of the two lacks it."""
    whole = math.sqrt(sum(float(e.double().square().sum()) for e in expected.values()))
    average = whole / math.sqrt(sum(e.numel() for e in expected.values()))
    gaps: dict[str, float] = {}
    for name in sorted({*found, *expected}):
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            gaps[name] = math.inf
            continue
        size = max(float(expected[name].double().norm()), SMALL * average * math.sqrt(expected[name].numel()))
        difference = float((found[name].double() - expected[name].double()).norm())
        gaps[name] = difference / size if math.isfinite(difference) else math.inf
    return gaps


def compare(found: CaseResult, expected: CaseResult, gradient: Mapping[str, float], tolerance: Tolerance) -> list[Gap]:
    """The largest gap of every kind.

    Args:
        found: of a layout.
        expected: of the reference.
        gradient: from `differences`.
        tolerance: what is allowed.
    """
    steps = sorted(set(found.losses) & set(expected.losses))
    gaps = [worst("loss", {f"step {s}": _off(found.losses, expected.losses, s) for s in steps}, tolerance.loss)]
    if found.again:
        again = {f"step {s}": _off(found.again, expected.losses, s) for s in found.again}
        gaps.append(worst(RESUMED, again, tolerance.loss))
    compared = [s for s in steps if tolerance.norm_steps is None or s <= tolerance.norm_steps]
    if compared:
        norms = {f"step {s}": _off(found.norms, expected.norms, s) for s in compared}
        gaps.append(worst("gradient norm", norms, tolerance.norm))
    if found.heldout is not None and expected.heldout is not None:
        off = abs(found.heldout - expected.heldout) / expected.heldout
        gaps.append(Gap("held-out loss", off, tolerance.loss, "the end"))
    if gradient:
        shares = {name: value / tolerance.gradient.get(name, 1.0) for name, value in gradient.items()}
        name = max(shares, key=lambda n: shares[n])
        gaps.append(Gap("gradient", gradient[name], tolerance.gradient.get(name, 1.0), name))
    return gaps


def worst(what: str, values: Mapping[str, float], tolerance: float) -> Gap:
    """The largest of some differences."""
    at = max(values, key=lambda key: values[key])
    return Gap(what, values[at], tolerance, at)


def _off(found: Mapping[int, float], expected: Mapping[int, float], step: int) -> float:
    off = abs(found[step] - expected[step]) / abs(expected[step])
    return off if math.isfinite(off) else math.inf
