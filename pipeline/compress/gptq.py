"""GPTQ: rounds the weights of a linear layer one input at a time; the inputs that are left make up for the error.

For a layer with inputs x the error of its output is tr(dW H dW^T), H = E[x x^T]. After input j is rounded, the others
are changed so that this error is smallest; the Cholesky factor of H^-1 has all that is needed for every j.
Source: Frantar et al. 2023 (arXiv:2210.17323), algorithm 1; inputs are taken in the order of falling H_jj, with the
scales of the original groups, so that what is stored has no permutation.

Shapes: O outputs, I inputs, G groups of inputs in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.models.rounding import Rounding, e4m3, integers

__all__ = ["Rounding", "e4m3", "gptq", "integers"]

_BLOCK = 128
"""Inputs whose corrections are applied one by one; those behind are corrected once a block, by a matrix product."""
_DAMPING = (0.01, 0.1, 1.0)
"""Added to the diagonal of H, as a fraction of its mean; the next where H is still not positive definite."""


@torch.no_grad()
def gptq(weight: Tensor, hessian: Tensor, scale: Tensor, *, rounding: Rounding) -> Tensor:
    """Rounds a weight matrix.

    Args:
        weight: fp32 [O, I].
        hessian: fp32 [I, I], the mean of x x^T over calibration tokens.
        scale: fp32 [O, G]; I is a multiple of G.
        rounding: to the numbers that the scheme stores.

    Returns:
        fp32 [O, I], every element a number that its scale can store.
    """
    outputs, inputs = weight.shape
    group = inputs // scale.shape[1]
    hessian, weight = hessian.clone(), weight.clone()
    diagonal = hessian.diagonal()
    unused = diagonal == 0  # inputs that are always 0, whose weights do not matter
    diagonal[unused] = 1.0
    order = torch.argsort(diagonal, descending=True, stable=True)
    weight, factor = weight[:, order], _inverse_factor(hessian[order][:, order])
    columns = scale[:, order // group]
    rounded = torch.empty_like(weight)
    for begin in range(0, inputs, _BLOCK):
        end = min(begin + _BLOCK, inputs)
        errors = weight.new_empty(outputs, end - begin)
        for j in range(begin, end):
            rounded[:, j] = rounding(weight[:, j], columns[:, j])
            errors[:, j - begin] = (weight[:, j] - rounded[:, j]) / factor[j, j]
            weight[:, j:end] -= errors[:, j - begin, None] * factor[j, j:end]
        weight[:, end:] -= errors @ factor[begin:end, end:]
    found = torch.empty_like(rounded)
    found[:, order] = rounded
    return found


def _inverse_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, [I, I]."""
    mean = hessian.diagonal().mean()
    for damping in _DAMPING:
        damped = hessian + torch.eye(len(hessian), device=hessian.device) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            found: Tensor
            found, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return found
    raise AssertionError("a matrix of squares with its mean added to the diagonal is positive definite")
