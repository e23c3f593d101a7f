"""The page `docs/reference/scale.md` of what was measured: each part's cost at a thousand nodes, and its growth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from tests.scale.measuring import Figures, Part
from tests.sweeps.sweep import wrapped

LINEAR = 1.2
"""Exponents up to this are linear: n log n over the sizes of a sweep, and the noise of a shared machine."""


@dataclass(frozen=True)
class Growth:
    """Power law through measured values.

    Attributes:
        sizes: ascending.
        values: positive.
    """

    sizes: Sequence[int]
    values: Sequence[float]

    @property
    def exponent(self) -> float:
        """Least squares of the logarithms over all sizes; nan where a value is not positive."""
        if min(self.values) <= 0:
            return float("nan")
        return float(np.polyfit(np.log(self.sizes), np.log(self.values), 1)[0])

    def at(self, size: int) -> float:
        """The value at a size: measured, or from the largest one on with the larger of two exponents.

        That over all sizes is too small where a constant hides the growth, that of the two largest sizes is noisy.
        """
        if size in self.sizes:
            return self.values[self.sizes.index(size)]
        if min(self.values) <= 0:
            return self.values[-1]
        last = Growth(self.sizes[-2:], self.values[-2:]).exponent
        return float(self.values[-1] * (size / self.sizes[-1]) ** max(0.0, self.exponent, last))


LIMITS = {"cpu_s": 60.0, "bytes": 2.0 * 2**30, "file_operations": 60_000.0}
"""Of one process: a minute, 2 GiB, and a minute of a thousand file operations a second."""
_COUNTS = {"cpu_s": 2.0, "bytes": 64.0 * 2**20, "file_operations": 2000.0, "messages": 1e9, "read_bytes": 2.0**34}
"""Values at the target below which growth does not matter."""
_LARGE = (
    "Tokens, bytes, samples and steps are counted in 64-bit or Python integers. Tests cover the boundaries:"
    " token files, runs and arrays of 4 GiB and more, the order of samples up to 2^63, 2^31 steps passed over,"
    " positions in a checkpoint's files up to 2^62, counts of a journal past 2^63. A document of 2^31 tokens and a"
    " sample past 2^63 are refused."
)
_NOT_MEASURED = (
    "NCCL: its connections, its own requests to the store, and its splits into groups: one for each axis.",
    "Host names: torch's store looks up the host of each connection, two per rank, in the thread that answers all"
    " ranks. 60 connections took 5 s here while the resolver did not answer, and 0.02 s with names from files alone, as"
    " in the cells of joining and waiting. Rank 0's host needs a resolver that answers for all hosts, or a file.",
    "Gloo in the place of NCCL: without `TORCH_GLOO_LAZY_INIT`, which runs on GPUs set, each rank asks the store three"
    " times for each other rank, and connects to all.",
    "The latency and the limits of a file system and of a network: operations and messages are counted.",
    "`headrace plan --search --verify` and `headrace check --exact`, which execute steps: the sweep `gpu` does.",
)
_HEADINGS = {
    "cpu_s": "CPU",
    "seconds": "time",
    "bytes": "memory",
    "file_operations": "file operations",
    "messages": "messages",
    "read_bytes": "bytes read",
}


@dataclass(frozen=True)
class Judged:
    """A part with what was measured of it.

    Attributes:
        part: the part.
        growths: name of a figure -> its values over the sizes; of figures that are not 0 alone.
    """

    part: Part
    growths: Mapping[str, Growth]

    def exceeded(self) -> list[str]:
        """What is over a limit at the target, or grows faster than linearly there."""
        found = []
        for name, growth in self.growths.items():
            value = growth.at(self.part.target)
            if self.part.per_process and value > LIMITS.get(name, math.inf):
                found.append(f"{shown(name, value)} {_HEADINGS[name]} (limit {shown(name, LIMITS[name])})")
            if name in _COUNTS and value > _COUNTS[name] and growth.exponent > LINEAR:
                found.append(f"{_HEADINGS[name]} grows with exponent {growth.exponent:.2f}")
        return found


def judge(part: Part, figures: Mapping[int, Figures]) -> Judged:
    """What was measured of a part at all of its sizes."""
    growths = {}
    for field in fields(Figures):
        values = [getattr(figures[size], field.name) for size in part.sizes]
        if any(values):
            growths[field.name] = Growth(part.sizes, values)
    return Judged(part, growths)


def lines(judged: Sequence[Judged], skipped: Sequence[str] = ()) -> list[str]:
    """The lines of the page behind its table of cells.

    Args:
        judged: the parts that were measured.
        skipped: parts that were not measured, with the reason.
    """
    over = [each for each in judged if each.exceeded()]
    made = ["## What is over a limit, or grows faster than linearly", ""]
    made += [
        wrapped(f"- **{each.part.name}**: {'; '.join(each.exceeded())}. {each.part.note}".rstrip()) for each in over
    ]
    made += [] if over else ["Nothing."]
    for group in dict.fromkeys(each.part.group for each in judged):
        own = [each for each in judged if each.part.group == group]
        made += ["", f"## {group[0].upper()}{group[1:]}", ""]
        notes = ["" if each in over else each.part.note for each in own]
        about = [f"- *{_title(each.part)}*: {each.part.what} {note}" for each, note in zip(own, notes, strict=True)]
        made += [wrapped(each.rstrip()) for each in about]
        names = [name for name in _HEADINGS if any(name in each.growths for each in own)]
        headings = " | ".join(_HEADINGS[name] for name in names)
        made += ["", f"| part | size | {headings} | growth from |", "|---|---:|" + "---:|" * (len(names) + 1)]
        made += [row for each in own for row in _rows(each, names)]
    made += ["", "## Beyond 2^31", "", wrapped(_LARGE)]
    return [*made, "", "## Not measured", "", *(wrapped(f"- {each}") for each in (*_NOT_MEASURED, *skipped))]


def _rows(each: Judged, names: Sequence[str]) -> list[str]:
    """A part's figures at its largest size, with their exponents of growth, and at its target where that is another."""
    part = each.part
    largest = {name: shown(name, growth.values[-1]) + _power(growth) for name, growth in each.growths.items()}
    at_target = {name: shown(name, growth.at(part.target)) for name, growth in each.growths.items()}
    rows = [(_title(part), f"{part.sizes[-1]:,} {part.unit}", largest, f"{part.sizes[0]:,}")]
    if part.target not in part.sizes:
        rows.append(("", f"**{part.target:,}**, from there", at_target, ""))
    cells = ((title, size, *(figures.get(name, "") for name in names), start) for title, size, figures, start in rows)
    return [f"| {' | '.join(row)} |" for row in cells]


def _power(growth: Growth) -> str:
    return "" if math.isnan(growth.exponent) else f" ^{growth.exponent:.2f}"


def _title(part: Part) -> str:
    return part.name.partition(": ")[2] or part.name


def shown(name: str, value: float) -> str:
    """A figure with its unit, to two or three digits."""
    if name in ("cpu_s", "seconds"):
        return f"{value:.2g} s" if value < 10 else f"{value:,.0f} s"
    if name in ("bytes", "read_bytes"):
        for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
            if value >= size:
                return f"{value / size:.3g} {unit}"
        return f"{value / 1000:.0f} kB"
    return f"{value:,.0f}"
