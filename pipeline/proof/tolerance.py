"""How far two layouts of one run may be apart, from the arithmetic alone. Written out in docs/parity.md.

Layouts differ in where they round and in the order in which they add, and in nothing else. With unit roundoff u, a sum
of n terms in two orders differs by about u sqrt(n) of its size, n u at worst.
"""

from __future__ import annotations

from dataclasses import dataclass

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
"""Half the distance from 1 to the next number: fp32 has 24 bits of significand, bf16 8, fp16 11."""

PATH = 8.0
"""What a gradient picks up on its way: about a hundred roundings (5 per matrix product and norm, forward and backward,
over a few layers) add up like a random walk to 10, beside the sum over tokens; measured is a fourteenth of it."""

DRAWS = 3.0
"""Two independent errors of size d are sqrt(2) d apart; three leaves room for their spread over tensors."""

LOSS_FP32 = 1e-5
"""Over 20 steps. One step is good to 2e-7; Adam divides by a gradient's own size, so that an element near zero turns
its rounding error into a step of full size."""

NORM_FP32 = 1e-4
"""Over 20 steps. A gradient changes faster than the loss along a curve: by about ten times."""


@dataclass(frozen=True)
class Tolerance:
    """Relative tolerances of one comparison.

    Attributes:
        loss: on the loss of every step, and on held-out data.
        norm: on the gradient norm.
        norm_steps: of so many first steps; all when None.
        gradient: on every tensor of the first gradient, by name.
    """

    loss: float
    norm: float
    norm_steps: int | None
    gradient: dict[str, float]


def fp32(names: list[str], *, tokens: int) -> Tolerance:
    """In fp32, for steps of so many tokens."""
    gradient = PATH * UNIT_ROUNDOFF["fp32"] * tokens**0.5
    return Tolerance(LOSS_FP32, NORM_FP32, None, dict.fromkeys(names, gradient))


def half(dtype: str, own_error: dict[str, float], *, tokens: int) -> Tolerance:
    """In bf16 or fp16.

    What the dtype itself does to a gradient is measured: `own_error`, the plain reference in it against the plain
    reference in fp32. Another layout is another draw of such errors. Losses of single tokens are off by some u and
    average out, and what does not is at most u. After the first update curves part, and norms are no criterion.

    Args:
        dtype: bf16 or fp16.
        own_error: tensor -> relative difference of the references.
        tokens: of a step.
    """
    u = UNIT_ROUNDOFF[dtype]
    least = max(u, fp32([""], tokens=tokens).gradient[""])
    gradient = {name: DRAWS * max(error, least) for name, error in own_error.items()}
    return Tolerance(u, DRAWS * max(*own_error.values(), least), 1, gradient)
