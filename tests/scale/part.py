"""A part of the product whose cost grows with the size of a run, and the sizes at which it is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.scale.measuring import Figures


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        name: of the part, which begins with that of its group: "heartbeats: a minute".
        what: what is measured, for the page.
        unit: of the sizes.
        sizes: four or more, ascending.
        target: size of a thousand nodes of eight GPUs, or of what else the page's heading says.
        run: measures one size in a process of its own, with an empty directory to work in; asserts what must hold.
        note: what else the page says of it: what was mended, what stands, and why.
        absent: why it cannot be measured here, where a package is missing.
        per_process: whether the figures are of one process; of a file system that all share no limit is known.
    """

    name: str
    what: str
    unit: str
    sizes: tuple[int, ...]
    target: int
    run: Callable[[int, Path], Figures]
    note: str = ""
    per_process: bool = True
    absent: str | None = None

    @property
    def group(self) -> str:
        """The beginning of its name."""
        return self.name.partition(":")[0]
