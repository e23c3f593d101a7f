"""GPTQ: rounds the weights of a linear layer one input at a time; the remaining inputs compensate the error.

For a layer with inputs x the error of its output is tr(dW H dW^T), H = E[x x^T]. After input j is rounded, the
remaining inputs change to make this error smallest; the Cholesky factor of H^-1 has the coefficients for every j.
Source: Frantar et al. 2023 (arXiv:2210.17323), algorithm 1. Inputs are taken in the order of falling H_jj, with the
scales of the original groups: the stored result has no permutation.

Here the weights of one input are a row, contiguous in memory. Corrections are applied by halves: one matrix product
corrects the second half of the inputs for the first half, and each half is treated the same way, down to a few inputs
that are rounded one by one. So almost all of the arithmetic is in matrix products, for every cache size.

Shapes: O outputs, I inputs, G groups of inputs in a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.models.rounding import Rounding, e4m3, integers

__all__ = ["Rounding", "e4m3", "gptq", "integers"]

_LEAF = 8
"""Largest number of inputs that are rounded one by one; 4 to 64 take the same time within 6 %."""
_DAMPING = (0.01, 0.1, 1.0)
"""Fractions of its mean added to the diagonal of H, tried in turn until H is positive definite."""


@torch.no_grad()
def gptq(weight: Tensor, hessian: Tensor, scale: Tensor, *, rounding: Rounding) -> Tensor:
    """Rounds a weight matrix.

    Args:
        weight: fp32 [O, I], rows of one layer or of several layers with the same inputs.
        hessian: fp32 [I, I], mean of x x^T over calibration tokens.
        scale: fp32 [O, G]; I is a multiple of G.
        rounding: rounding to the numbers that the scheme stores.

    Returns:
        fp32 [O, I], every element a number that its scale can represent.
    """
    inputs = weight.shape[1]
    diagonal = _without_zeros(hessian.diagonal())
    order = torch.argsort(diagonal, descending=True, stable=True)
    rows = weight.T[order].contiguous()
    factor = _corrections(hessian, diagonal, order)
    scales = scale.T.contiguous()
    groups = (order // (inputs // len(scales))).tolist()
    rounded = torch.empty_like(rows)
    _round(rows, rounded, factor, lambda j, row: rounding(row, scales[groups[j]]), 0, inputs)
    found = torch.empty_like(rows)
    found[order] = rounded
    return found.T


def _without_zeros(diagonal: Tensor) -> Tensor:
    """Replaces zeros (inputs that are always 0) by the mean of the other elements; damping is a share of that mean."""
    zero = diagonal == 0
    mean = diagonal.sum() / (~zero).sum().clamp(min=1)
    return torch.where(zero, torch.where(mean == 0, 1.0, mean), diagonal)


def _round(
    rows: Tensor, rounded: Tensor, factor: Tensor, rounding: Callable[[int, Tensor], Tensor], begin: int, end: int
) -> None:
    """Rounds inputs `begin` to `end`, after the corrections of all inputs before `begin`.

    Args:
        rows: weights [I, O], corrected in place; rows of rounded inputs become their errors (old minus rounded value).
        rounded: [I, O], filled with the rounded weights.
        factor: result of `_corrections`.
        rounding: (input, its weights [O]) -> rounded weights [O].
        begin: first input.
        end: end of the inputs, exclusive.
    """
    if end - begin > _LEAF:
        middle = begin + max(_LEAF, (end - begin) // 2 // _LEAF * _LEAF)
        _round(rows, rounded, factor, rounding, begin, middle)
        rows[middle:end].addmm_(factor[begin:middle, middle:end].T, rows[begin:middle], alpha=-1)
        _round(rows, rounded, factor, rounding, middle, end)
        return
    for j in range(begin, end):
        row = rows[j]
        if j > begin:
            row.addmv_(rows[begin:j].T, factor[begin:j, j], alpha=-1)
        rounded[j] = rounding(j, row)
        row.sub_(rounded[j])


def _corrections(hessian: Tensor, diagonal: Tensor, order: Tensor) -> Tensor:
    """Share of the error of input i that input j > i takes: upper Cholesky factor of H^-1, rows by diagonal.

    With reversed inputs H = L L^T; in the original order H = R R^T, where R is upper and L reversed. R^-1 is the
    factor. One Cholesky decomposition and one triangular inverse are enough, with three matrices [I, I] in memory.

    Args:
        hessian: H, [I, I].
        diagonal: diagonal of H, [I], with zeros replaced.
        order: int64 [I], inputs in the order of rounding.
    """
    reverse, mean = order.flip(0), diagonal.mean()
    for damping in _DAMPING:
        damped = hessian[reverse][:, reverse]
        damped.diagonal().copy_(diagonal[reverse] + damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not failed:
            inverse = torch.eye(len(hessian), device=hessian.device)
            factor: Tensor = torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse).flip(0, 1)
            return factor.div_(factor.diagonal()[:, None].clone())
    raise AssertionError("a matrix of squares with its mean added to the diagonal is positive definite")
