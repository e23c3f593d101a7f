"""AdamW whose two moments are held in bf16: 4 bytes per parameter instead of 8.

An update is computed in fp32 from moments that are widened for it, and uses them as they are before they are rounded.
They are rounded stochastically: rounded to the nearest, the second moment would stop to follow the gradient, since with
beta2 0.999 a step changes it by less than half of the distance between two bf16 numbers (2^-9 to 2^-8 of them).

The random numbers are a hash of the step and of the element's index in its parameter: no generator has a state to save,
and a resumed run repeats them. They depend on the index, so a parameter has to be whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 1 << 24
"""Bound on the temporary tensors of an update, of which there are some five: 64 MiB each."""


class AdamWSmallMoments(torch.optim.Optimizer):
    """torch's AdamW with `exp_avg` and `exp_avg_sq` in bf16. Weights and gradients are fp32.

    As fused AdamW it takes two attributes, fp32 tensors with one element on the parameters' device, or None:

    Attributes:
        grad_scale: gradients are divided by it.
        found_inf: where it is 1, a step changes nothing. The host reads neither.

    Args:
        params: parameters or parameter groups; each parameter whole.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        # capturable: the step counter is on the device, as fused AdamW's is
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "capturable": True}
        super().__init__(params, {**defaults, "moments_dtype": torch.bfloat16})
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns the closure's value, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            zeros = {"dtype": group["moments_dtype"], "memory_format": torch.preserve_format}
            state.update({name: torch.zeros_like(parameter, **zeros) for name in ("exp_avg", "exp_avg_sq")})
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        skipped = None if self.found_inf is None else self.found_inf.reshape(()) > 0
        state["step"] += 1 if skipped is None else (~skipped).float()
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        assert all(each.is_contiguous() for each in tensors if each is not None), "moments are addressed by index"
        first = 0
        for pieces in zip(
            *(each.view(-1).split(_ELEMENTS_AT_ONCE) for each in tensors if each is not None), strict=True
        ):
            self._update_piece(*pieces, first=first, step=state["step"], skipped=skipped, group=group)
            first += pieces[0].numel()

    def _update_piece(
        self,
        weight: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        first: int,
        step: Tensor,
        skipped: Tensor | None,
        group: dict[str, Any],
    ) -> None:
        """The update of elements `first` to `first + n - 1` of a parameter; all tensors are flat."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        mean = exp_avg.float().lerp_(gradient, 1 - beta1)
        square = exp_avg_sq.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        bias1, bias2 = (1 - torch.pow(beta, step.double()) for beta in (beta1, beta2))
        denominator = square.sqrt().div_(bias2.sqrt().float()).add_(group["eps"])
        updated = (weight * (1 - lr * group["weight_decay"])).sub_((mean / denominator).mul_((lr / bias1).float()))
        random = random_bits(weight.numel(), first=first, step=step)
        rounded = (round_stochastically(mean, random), round_stochastically(square, random >> 16))
        for old, new in zip((weight, exp_avg, exp_avg_sq), (updated, *rounded), strict=True):
            old.copy_(new if skipped is None else torch.where(skipped, old, new))


def random_bits(count: int, *, first: int, step: Tensor) -> Tensor:
    """int32 [count]: 32 random bits for each element from number `first` on, the same for the same step.

    A finalizer of 32 bits with two multiplications, "lowbias32" by C. Wellons; arithmetic wraps around.

    Args:
        count: of elements.
        first: number of the first.
        step: whole number, scalar on the device.
    """
    numbers = torch.arange(first, first + count, device=step.device, dtype=torch.int64)
    bits = (numbers * 0x9E3779B1 + step.to(torch.int64) * 0x85EBCA6B).to(torch.int32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1)):
        # a shift of a signed number repeats its sign, which is masked
        bits = (bits ^ ((bits >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return bits


def round_stochastically(values: Tensor, random: Tensor) -> Tensor:
    """fp32 -> bf16: up or down with the probabilities whose mean is the value. Numbers of bf16 stay as they are.

    Args:
        values: fp32, finite.
        random: int32, of which the lower 16 bits are random.
    """
    bits = values.view(torch.int32) + (random & 0xFFFF)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)
