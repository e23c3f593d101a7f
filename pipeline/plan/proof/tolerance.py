"""Tolerances for comparing two layouts of one run, derived from rounding errors. Explained in docs/reference/parity.md.

Layouts differ only in where they round and in the order of summation. With unit roundoff u, sums of n terms in two
orders differ by about u sqrt(n) of their size, and by n u at worst.
"""

from __future__ import annotations

from dataclasses import dataclass

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
"""Unit roundoff, half the distance from 1 to the next number: fp32 has 24 bits of significand, bf16 8, fp16 11."""

PATH = 8.0
"""Rounding error along a gradient's computation path, in unit roundoffs, without the sum over tokens. About a hundred
roundings (5 per matrix product and norm, forward and backward, over a few layers) add up to 10, as a random walk; the
measured error is a fourteenth of that."""

DRAWS = 3.0
"""Factor on a rounding error: two independent errors of size d are sqrt(2) d apart; three leaves room for their spread
over tensors."""

LOSS_FP32 = 1e-5
"""Tolerance of the loss over 20 steps. One step is accurate to 2e-7. Adam divides by the gradient's size: for an
element near zero the rounding error becomes an update of full size."""

NORM_FP32 = 1e-4
"""Tolerance of the gradient norm over 20 steps. Along a training curve the gradient changes about ten times as fast as
the loss."""


@dataclass(frozen=True)
class Tolerance:
    """Relative tolerances of one comparison.

    Attributes:
        loss: tolerance of the loss of every step, and of the held-out loss.
        norm: tolerance of the gradient norm.
        norm_steps: number of first steps whose norm is compared; None for all.
        gradient: tensor -> tolerance of its first gradient.
    """

    loss: float
    norm: float
    norm_steps: int | None
    gradient: dict[str, float]


def fp32_tolerance(names: list[str], *, tokens: int) -> Tolerance:
    """Tolerances in fp32.

    Args:
        names: names of the tensors.
        tokens: tokens per step.
    """
    gradient = PATH * UNIT_ROUNDOFF["fp32"] * tokens**0.5
    return Tolerance(LOSS_FP32, NORM_FP32, None, dict.fromkeys(names, gradient))


def half_tolerance(dtype: str, own_error: dict[str, float], *, tokens: int) -> Tolerance:
    """Tolerances in bf16 or fp16.

    The dtype's rounding error in a gradient is measured as `own_error`: the reference run in that dtype compared with
    the reference run in fp32. Another layout is another random draw of such errors. Losses of single tokens differ by a
    few u and average out to at most u. After the first update the runs diverge: later norms are not compared.

    Args:
        dtype: bf16 or fp16.
        own_error: tensor -> relative difference between the two reference runs.
        tokens: tokens per step.
    """
    u = UNIT_ROUNDOFF[dtype]
    least = max(u, fp32_tolerance([""], tokens=tokens).gradient[""])
    gradient = {name: DRAWS * max(error, least) for name, error in own_error.items()}
    return Tolerance(u, DRAWS * max(*own_error.values(), least), 1, gradient)
