"""Orthogonalization by Newton-Schulz iterations, as Muon uses it (Jordan et al. 2024).

https://kellerjordan.github.io/posts/muon. Five applications of the quintic polynomial a x + b x^3 + c x^5 move every
singular value of a matrix to between 0.7 and 1.2. The result is not the nearest orthogonal matrix, but near enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of the polynomial, chosen for the steepest slope at zero (Jordan et al.)."""
NS_STEPS = 5
"""Number of iterations, as published."""
_SMALLEST_NORM = 1e-7
_ELEMENTS_AT_ONCE = 1 << 27
"""Most elements of a batch; the iteration stores it, a product of its size and two squares of the smaller dim."""


def newton_schulz(matrices: Tensor, *, steps: int) -> Tensor:
    """Approximates the nearest semi-orthogonal matrices of [..., m, n], in its shape and dtype.

    Norms are computed in fp32. A matrix of zeros stays zero.
    """
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = (x / norms.clamp(min=_SMALLEST_NORM)).to(matrices.dtype)
    for _ in range(steps):
        squares = x @ x.mT
        x = A * x + (B * squares + C * squares @ squares) @ x
    found: Tensor = x.mT if matrices.shape[-2] > matrices.shape[-1] else x
    return found


def orthogonalize(matrices: Sequence[Tensor], *, steps: int) -> list[Tensor]:
    """Orthogonalizes many matrices [..., m, n]; matrices of equal shape share a batch of products."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(tuple(matrix.shape[-2:]), []).append(index)
    found: dict[int, Tensor] = {}
    for shape, indices in by_shape.items():
        at_once = max(1, _ELEMENTS_AT_ONCE // math.prod(shape))
        for first in range(0, len(indices), at_once):
            batch = indices[first : first + at_once]
            done = newton_schulz(torch.stack([matrices[index] for index in batch]), steps=steps)
            found.update(zip(batch, done.unbind(), strict=True))
    return [found[index] for index in range(len(matrices))]


def flops(outputs: int, inputs: int, *, steps: int = NS_STEPS) -> int:
    """Counts the FLOPs for one matrix: for m x n, m <= n, each step takes 4 m^2 n + 2 m^3."""
    m, n = sorted((outputs, inputs))
    return steps * (4 * m * m * n + 2 * m**3)


def update_scale(outputs: int, inputs: int, *, rule: str) -> float:
    """Returns the factor on an orthogonalized matrix, `optimizer.params.adjust_lr`.

    Args:
        outputs: rows of the matrix.
        inputs: columns of the matrix.
        rule: `match_rms_adamw`: steps as large as AdamW's, so that AdamW's learning rates and weight decays apply (Liu
            et al. 2025, Moonlight, arXiv:2502.16982, section 2.2); `original`: the rule of Jordan et al.
    """
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(outputs, inputs))
    return math.sqrt(max(1.0, outputs / inputs))
