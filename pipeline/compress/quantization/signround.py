"""SignRound: learns the direction in which each weight of a decoder layer is rounded, and clips of the scales.

With scale s, offset v in [-1/2, 1/2] and clip c in [1/2, 1], a weight w is stored as q = clamp(round(w / (c s) + v)).
Each weight's v and each group's c move against the sign of their gradient, to keep the layer's output nearest to the
original; gradients pass rounding unchanged (straight-through estimator).
Source: Cheng et al. 2024, SignRound (arXiv:2309.05516), section 3: steps of 1/iterations that fall linearly to 0. Here
the target is the layer's own output for the inputs that the quantized layers before it give. The weights are rounded to
nearest where the learnt ones are no better over all windows.

Shapes: B windows per batch, T tokens, D model, O outputs, I inputs, G groups of inputs in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

_SMALLEST_CLIP = 0.5


@dataclass(frozen=True)
class SignRound:
    """Rounds decoder layers.

    Attributes:
        bits: function that returns the bits of a linear layer's integers.
        iterations: number of steps per decoder layer, one batch each.
    """

    bits: Callable[[nn.Linear], int]
    iterations: int

    def fit(
        self,
        layer: nn.Module,
        linear: Mapping[str, nn.Linear],
        hidden: Sequence[Tensor],
        arguments: dict[str, Any],
        *,
        scale: Callable[[nn.Linear], Tensor],
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Rounds the weights of a decoder layer in place.

        Args:
            layer: decoder layer in fp32, on the device.
            linear: name -> linear layer, within `layer`, to round.
            hidden: input of the layer for every batch, fp32 [B, T, D].
            arguments: other arguments of the layer, on the device.
            scale: function that returns the scales [O, G] of a linear layer, in the dtype in which they are stored.
            device: device on which the layer is run.

        Returns:
            Name -> scales of every rounded layer.
        """
        own = {id(module): path for path, module in layer.named_modules()}
        found = {name: _Learnt(module, scale(module), self.bits(module)) for name, module in linear.items()}
        paths = {name: f"{own[id(module)]}.weight" for name, module in linear.items()}

        def run(states: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
            given = {paths[name]: weight for name, weight in weights.items()}
            made = functional_call(layer, given, (states.to(device),), arguments)
            output: Tensor = made[0] if isinstance(made, tuple) else made
            return output

        with torch.no_grad():
            targets = [run(states, {}).cpu() for states in hidden]
        nearest = {name: each.weight().detach() for name, each in found.items()}
        self._learn(found, run, hidden, targets)
        learnt = {name: each.stored() for name, each in found.items()}
        with torch.no_grad():
            better = _error(run, hidden, targets, learnt) < _error(run, hidden, targets, nearest)
            for name, module in linear.items():
                module.weight.copy_((learnt if better else nearest)[name])
        return {name: each.stored_scale(clipped=better).cpu() for name, each in found.items()}

    @torch.enable_grad()
    def _learn(
        self,
        found: Mapping[str, _Learnt],
        run: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
        hidden: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> None:
        parameters = [each for one in found.values() for each in (one.offset, one.clip)]
        for number in range(self.iterations):
            at = number % len(hidden)
            made = run(hidden[at], {name: each.weight() for name, each in found.items()})
            loss = (made - targets[at].to(made.device)).square().mean()
            gradients = torch.autograd.grad(loss, parameters)
            step = (1 - number / self.iterations) / self.iterations
            for one, offset, clip in zip(found.values(), gradients[::2], gradients[1::2], strict=True):
                one.move(offset, clip, step)


class _Learnt:
    """Learnt offsets [O, I] and clips [O, G] of one linear layer."""

    def __init__(self, module: nn.Linear, scale: Tensor, bits: int) -> None:
        self._weight, self._scale = module.weight.detach().clone(), scale
        self._lowest, self._highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        self.offset = torch.zeros_like(self._weight, requires_grad=True)
        self.clip = torch.ones_like(scale, dtype=torch.float32, requires_grad=True)

    def weight(self) -> Tensor:
        """The rounded weight, fp32 [O, I], with gradients for offset and clip."""
        return self._rounded(self._scale.float() * self.clip)

    @torch.no_grad()
    def stored(self) -> Tensor:
        """The rounded weight, fp32 [O, I], with the scales as they are stored."""
        return self._rounded(self.stored_scale(clipped=True).float())

    @torch.no_grad()
    def stored_scale(self, *, clipped: bool) -> Tensor:
        """The scales [O, G], clipped or not, in their stored dtype."""
        return (self._scale.float() * self.clip).to(self._scale.dtype) if clipped else self._scale

    @torch.no_grad()
    def move(self, offset: Tensor, clip: Tensor, step: float) -> None:
        """Moves offsets and clips against the signs of their gradients."""
        self.offset.sub_(step * offset.sign()).clamp_(-0.5, 0.5)
        self.clip.sub_(step * clip.sign()).clamp_(_SMALLEST_CLIP, 1.0)

    def _rounded(self, scale: Tensor) -> Tensor:
        columns = scale.repeat_interleave(self._weight.shape[1] // scale.shape[1], 1)
        steps = self._weight / columns + self.offset
        rounded = steps + (steps.round() - steps).detach()
        return rounded.clamp(self._lowest, self._highest) * columns


def _error(
    run: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
    hidden: Sequence[Tensor],
    targets: Sequence[Tensor],
    weights: Mapping[str, Tensor],
) -> float:
    """Sum of the squared errors of the outputs of all batches."""
    pairs = zip(hidden, targets, strict=True)
    return sum(float((run(states, weights).cpu() - target).square().sum()) for states, target in pairs)
