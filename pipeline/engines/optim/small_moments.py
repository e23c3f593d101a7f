"""AdamW with both moments stored in bf16 or 8 bits: 4 or 2.03 bytes per parameter instead of 8.

An update is computed in fp32: the stored moments are widened, and the new moments are used before they are rounded.
Rounding is stochastic. With rounding to nearest the second moment would stop following the gradient: with beta2 0.999 a
step changes it by less than half of the distance between two bf16 numbers (2^-9 to 2^-8 of them), or 8-bit codes (2^-4,
see `optim.log_codes`).

The random numbers are a hash of the step and the element's index in its parameter: there is no generator state to save,
and a resumed run repeats them. Since they depend on the index, a parameter has to be whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.config.sections.optimizers import CODE_BLOCK
from pipeline.engines.optim.log_codes import decode, encode

_MEAN, _SQUARE = "exp_avg", "exp_avg_sq"
_ELEMENTS_AT_ONCE = 1 << 24
"""Largest number of elements of an update's temporary tensors (about five, ten with codes): 64 MiB each."""


class AdamWSmallMoments(torch.optim.Optimizer):
    """torch's AdamW with `exp_avg` and `exp_avg_sq` in bf16, or as 8-bit codes. Weights and gradients are fp32.

    Like fused AdamW it has two attributes, fp32 tensors with one element on the parameters' device, or None:

    Attributes:
        grad_scale: divisor of the gradients.
        found_inf: 1 for a step that changes nothing. The host reads neither attribute.

    Args:
        params: parameters or parameter groups; each parameter whole.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        moments_dtype: bfloat16, or uint8 for codes; the scales of codes are further states of a parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        moments_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        # capturable: the step counter is on the device, as in fused AdamW
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "capturable": True}
        super().__init__(params, {**defaults, "moments_dtype": moments_dtype})
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    self._update(parameter, group)

    def empty_moment(self, parameter: Tensor, name: str) -> dict[str, Tensor]:
        """Makes the states of a moment of zeros, by name."""
        dtype = self.defaults["moments_dtype"]
        states = {name: torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)}
        if dtype == torch.uint8:
            blocks = -(-parameter.numel() // CODE_BLOCK)
            states[_scales(name)] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        return states

    def moment(self, parameter: Tensor, name: str) -> Tensor:
        """Returns a moment in the form of checkpoints: an exact copy, fp32 in the parameter's shape, on the CPU."""
        state = self.state[parameter]
        held: Tensor = state[name].cpu()
        if held.dtype != torch.uint8:
            return held.float()
        return decode(held.view(-1), state[_scales(name)].cpu(), signed=name == _MEAN).view(held.shape)

    @torch.no_grad()
    def set_moment(self, parameter: Tensor, name: str, values: Tensor) -> None:
        """Replaces a moment. Values that `moment` returned are stored exactly; others by rounding to nearest.

        Args:
            parameter: the parameter of the moment.
            name: `exp_avg` or `exp_avg_sq`.
            values: fp32, as many as the parameter has elements, on any device.
        """
        state = self.state[parameter]
        if state[name].dtype != torch.uint8:
            state[name].copy_(values.view(state[name].shape))
            return
        codes, scales = encode(values.view(-1), signed=name == _MEAN, random=None)
        state[name].copy_(codes.view(state[name].shape))
        state[_scales(name)].copy_(scales)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            for name in (_MEAN, _SQUARE):
                state.update(self.empty_moment(parameter, name))
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        skipped = None if self.found_inf is None else self.found_inf.reshape(()) > 0
        state["step"] += 1 if skipped is None else (~skipped).float()
        weight, gradient = parameter, parameter.grad
        assert gradient is not None
        assert all(each.is_contiguous() for each in (weight, gradient, state[_MEAN])), "moments are addressed by index"
        for first in range(0, weight.numel(), _ELEMENTS_AT_ONCE):
            piece = slice(first, first + _ELEMENTS_AT_ONCE)
            moments = [_Moment.of(state, name, first=first) for name in (_MEAN, _SQUARE)]
            self._update_piece(
                weight.view(-1)[piece],
                gradient.view(-1)[piece],
                moments,
                first=first,
                step=state["step"],
                skipped=skipped,
                group=group,
            )

    def _update_piece(
        self,
        weight: Tensor,
        gradient: Tensor,
        moments: list[_Moment],
        *,
        first: int,
        step: Tensor,
        skipped: Tensor | None,
        group: dict[str, Any],
    ) -> None:
        """Updates elements `first` to `first + n - 1` of a parameter; all tensors are flat."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        mean = moments[0].values().lerp_(gradient, 1 - beta1)
        square = moments[1].values().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        bias1, bias2 = (1 - torch.pow(beta, step.double()) for beta in (beta1, beta2))
        denominator = square.sqrt().div_(bias2.sqrt().float()).add_(group["eps"])
        updated = (weight * (1 - lr * group["weight_decay"])).sub_((mean / denominator).mul_((lr / bias1).float()))
        random = random_bits(weight.numel(), first=first, step=step)
        held = [weight, *moments[0].held, *moments[1].held]
        rounded = [updated, *moments[0].rounded(mean, random), *moments[1].rounded(square, random >> 16)]
        for old, new in zip(held, rounded, strict=True):
            old.copy_(new if skipped is None else torch.where(skipped, old, new))


@dataclass(frozen=True)
class _Moment:
    """A flat piece of a moment, as views of its storage: bf16 numbers, or codes and their scales."""

    held: tuple[Tensor, ...]
    signed: bool

    @classmethod
    def of(cls, state: dict[str, Tensor], name: str, *, first: int) -> _Moment:
        """Makes the piece of a moment for the update that begins with element `first`."""
        held = [state[name].view(-1)[first : first + _ELEMENTS_AT_ONCE]]
        if _scales(name) in state:
            assert _ELEMENTS_AT_ONCE % CODE_BLOCK == 0
            held.append(state[_scales(name)][first // CODE_BLOCK :][: _ELEMENTS_AT_ONCE // CODE_BLOCK])
        return cls(tuple(held), name == _MEAN)

    def values(self) -> Tensor:
        """Returns the numbers as a new fp32 tensor."""
        if len(self.held) == 1:
            return self.held[0].float()
        return decode(*self.held, signed=self.signed)

    def rounded(self, values: Tensor, random: Tensor) -> tuple[Tensor, ...]:
        """Rounds new values to the form in which the piece is stored."""
        if len(self.held) == 1:
            return (round_stochastically(values, random),)
        return encode(values, signed=self.signed, random=random)


def _scales(name: str) -> str:
    return f"{name}_scale"


def random_bits(count: int, *, first: int, step: Tensor) -> Tensor:
    """Returns 32 random bits per element from index `first` on, int32 [count], a function of step and index.

    The hash is a 32-bit finalizer with two multiplications, "lowbias32" by C. Wellons; arithmetic wraps around.

    Args:
        count: number of elements.
        first: index of the first element.
        step: step counter, a scalar on the device.
    """
    numbers = torch.arange(first, first + count, device=step.device, dtype=torch.int64)
    bits = (numbers * 0x9E3779B1 + step.to(torch.int64) * 0x85EBCA6B).to(torch.int32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1)):
        # a shift of a signed number repeats the sign, so it is masked
        bits = (bits ^ ((bits >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return bits


def round_stochastically(values: Tensor, random: Tensor) -> Tensor:
    """Rounds fp32 to bf16 stochastically, so that the mean is the value; exact bf16 numbers do not change.

    Args:
        values: fp32, finite.
        random: int32 with 16 random lower bits.
    """
    bits = values.view(torch.int32) + (random & 0xFFFF)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)
