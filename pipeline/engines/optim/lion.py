"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.config.sections.optimizers import OptimizerParams

_ELEMENTS_AT_ONCE = 1 << 24
"""Largest number of elements of an update's temporary tensor: 64 MiB in fp32. A tensor as large as all gradients would
take the memory that Lion saves compared with AdamW."""


def build(groups: list[dict[str, Any]], params: OptimizerParams, *, lr: float, fused: bool) -> Lion:  # noqa: ARG001
    """Builds Lion from parameter groups; there is no fused kernel."""
    assert params.betas is not None
    return Lion(groups, lr=lr, betas=params.betas)


class Lion(torch.optim.Optimizer):
    """w <- w - lr (sign(b1 m + (1 - b1) g) + weight_decay w), then m <- b2 m + (1 - b2) g.

    Weight decay is decoupled, as in AdamW. The update is element-wise: parts of a parameter can be updated separately.
    g is the gradient, m the state `exp_avg`, initially zero.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, the size of every element's update before weight decay.
        betas: b1, weight of the old momentum in the update; b2, its weight in the new momentum.
        weight_decay: decoupled weight decay.

    Attributes:
        grad_scale, found_inf: fp32 scalars on the device, or None, as in torch's fused optimizers: gradients are
            divided by `grad_scale`, and nothing changes if `found_inf` is 1.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            for batch in _batches([(p, p.grad, self._momentum(p)) for p in present]):
                keys = {"lr": float(group["lr"]), "betas": group["betas"], "weight_decay": group["weight_decay"]}
                _update(*batch, **keys, grad_scale=self.grad_scale, found_inf=self.found_inf)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        momentum: Tensor = state["exp_avg"]
        return momentum


def _update(
    weights: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    if grad_scale is not None:
        gradients = list(torch._foreach_div(gradients, grad_scale.to(gradients[0].dtype)))
    directions = torch._foreach_mul(momenta, betas[0])
    torch._foreach_add_(directions, gradients, alpha=1 - betas[0])
    torch._foreach_sign_(directions)
    if found_inf is None:
        _apply(weights, directions, gradients, momenta, lr=lr, beta=betas[1], weight_decay=weight_decay)
        return
    before = [each.clone() for each in (*weights, *momenta)]
    _apply(weights, directions, gradients, momenta, lr=lr, beta=betas[1], weight_decay=weight_decay)
    for new, old in zip((*weights, *momenta), before, strict=True):
        new.copy_(torch.where(found_inf == 1, old, new))


def _apply(
    weights: list[Tensor],
    directions: Sequence[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    *,
    lr: float,
    beta: float,
    weight_decay: float,
) -> None:
    if weight_decay:
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
    torch._foreach_add_(weights, list(directions), alpha=-lr)
    torch._foreach_mul_(momenta, beta)
    torch._foreach_add_(momenta, gradients, alpha=1 - beta)


def _batches(
    triples: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """Yields weights, gradients and momenta, `_ELEMENTS_AT_ONCE` elements at a time: few kernels, bounded memory."""
    batch: list[tuple[Tensor, ...]] = []
    elements = 0
    for pieces in (pieces for triple in triples for pieces in _pieces(triple)):
        if batch and elements + pieces[0].numel() > _ELEMENTS_AT_ONCE:
            yield _columns(batch)
            batch, elements = [], 0
        batch.append(pieces)
        elements += pieces[0].numel()
    if batch:
        yield _columns(batch)


def _pieces(triple: tuple[Tensor, Tensor, Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yields views of at most `_ELEMENTS_AT_ONCE` elements; the tensors themselves if they are not contiguous."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in triple]
    if not local[0].numel():
        return
    if not all(each.is_contiguous() for each in local):
        yield tuple(local)
        return
    yield from zip(*(each.view(-1).split(_ELEMENTS_AT_ONCE) for each in local), strict=True)


def _columns(batch: list[tuple[Tensor, ...]]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    weights, gradients, momenta = (list(column) for column in zip(*batch, strict=True))
    return weights, gradients, momenta
