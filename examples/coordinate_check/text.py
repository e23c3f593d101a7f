"""Results of a coordinate check and of a learning-rate sweep, as lines of text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from examples.coordinate_check.check import FLAT, Line
from examples.coordinate_check.rates import Sweep


def uneven(lines: Sequence[Line]) -> list[Line]:
    """The lines of CompleteP that are not flat."""
    return [line for line in lines if line.parametrization == "completep" and not line.flat]


def text_lines(lines: Sequence[Line]) -> Iterator[str]:
    """A table of all slopes, and whether CompleteP is flat."""
    yield f"{'parametrization':16}{'place':18}{'over':7}{'slope':>7}  change at each size"
    for line in lines:
        values = ", ".join(f"{size}: {value:.3g}" for size, value in zip(line.sizes, line.values, strict=True))
        yield f"{line.parametrization:16}{line.place:18}{line.dimension:7}{line.slope:7.2f}  {values}"
    for line in (found := uneven(lines)):
        yield f"not flat: {line.place} over {line.dimension}, slope {line.slope:.2f} (at most {FLAT})"
    less = [line for line in lines if line.parametrization == "completep" and line.shrinks]
    for line in less:
        yield f"shrinks with depth: {line.place}, slope {line.slope:.2f}; layers do not learn alike, which is no error"
    if not found:
        yield "CompleteP does not grow" if less else "CompleteP is flat"


def as_json(lines: Sequence[Line]) -> dict[str, Any]:
    """All lines with their slopes; null for a line without a slope."""
    return {"lines": [{**asdict(line), "slope": None if math.isnan(line.slope) else line.slope} for line in lines]}


def sweep_lines(sweeps: Sequence[Sweep]) -> Iterator[str]:
    """The best learning rate of every size."""
    for each in sweeps:
        yield f"{each.parametrization}, {each.size}: best learning rate {each.best:.3g}, loss {min(each.losses):.4f}"


def sweeps_json(sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """All losses in nats per token; null for a run that diverged."""
    return {"sweeps": [_plain(each) for each in sweeps]}


def _plain(each: Sweep) -> dict[str, Any]:
    size = {"width": each.size.width, "depth": each.size.depth}
    losses = [loss if math.isfinite(loss) else None for loss in each.losses]
    return {"parametrization": each.parametrization, **size, "rates": each.rates, "losses": losses, "best": each.best}
