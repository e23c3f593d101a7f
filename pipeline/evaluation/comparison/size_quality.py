"""The size-quality picture: bytes against KL or loss, labelled points, and the Pareto frontier. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from foundation.directory import write_text
from pipeline.evaluation.comparison.rows import Row

_WIDTH, _HEIGHT = 8.0, 5.0  # inches
_LOGARITHMIC = 5.0
"""Ratio of the largest KL to the smallest above which the axis is logarithmic."""


@dataclass(frozen=True)
class Point:
    """A row in the picture: index among the rows, label, size in bytes, and value on the y axis."""

    index: int
    label: str
    bytes: int
    value: float


@dataclass(frozen=True)
class Look:
    """Colors of the points, the frontier, the labels and the background."""

    point: str
    line: str
    text: str
    ground: str


@dataclass(frozen=True)
class Picture:
    """Points and the meaning of their y axis.

    Attributes:
        points: points in the order of the rows.
        axis: label of the y axis, with the unit.
        logarithmic: whether the y axis is logarithmic.
    """

    points: tuple[Point, ...]
    axis: str
    logarithmic: bool


def picture_of(rows: Sequence[Row], *, quality: str = "auto") -> Picture | None:
    """Makes the picture of the rows; None where too few rows have both numbers.

    Args:
        rows: rows of a comparison; the first is the reference.
        quality: "kl", "loss", or "auto": KL where two rows beside the reference have it, loss otherwise. A KL of 0,
            like the reference's own, cannot be on a logarithmic axis and is left out.
    """
    kl = _points(rows, [row.mean_kl or None for row in rows])
    if quality == "kl" or (quality == "auto" and len(kl) >= 2):
        axis = "mean KL to the first model, nats per token"
        return Picture(kl, axis, logarithmic=_wide([point.value for point in kl])) if kl else None
    loss = _points(rows, [row.loss_nats for row in rows])
    return Picture(loss, "held-out loss, nats per token", logarithmic=False) if len(loss) >= 2 else None


def _wide(values: Sequence[float]) -> bool:
    return max(values) > _LOGARITHMIC * min(values)


def pareto(points: Sequence[Point]) -> list[Point]:
    """The Pareto front by size: points than which no other point is both smaller and better."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (each.bytes, each.value)):
        if not best or point.value < best[-1].value:
            best.append(point)
    return best


def save_svg(rows: Sequence[Row], path: Path, *, quality: str = "auto") -> bool:
    """Writes the picture as an SVG file, atomically; returns False, without a file, where there is nothing to draw.

    Args:
        rows: rows that `frontier` returns.
        path: the file; its directory exists.
        quality: "kl", "loss" or "auto" (`picture_of`).
    """
    picture = picture_of(rows, quality=quality)
    if picture is None:
        return False
    import matplotlib as mpl  # noqa: PLC0415  (takes a second)
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": "headrace", "svg.fonttype": "none", "font.size": 11}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, picture, Look("#1f5fa8", "#5a636b", "#1d2125", "#ffffff"))
        axes.set_title("Size and quality", loc="left")
        drawn = StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": "headrace"})
    write_text(path, drawn.getvalue())
    return True


def draw(axes: Any, picture: Picture, look: Look, *, room: float = 1.25) -> None:
    """Draws the picture into matplotlib axes; the x axis ends at `room` times the largest size: labels need room."""
    best = pareto(picture.points)
    axes.plot(
        [each.bytes / 1e6 for each in best],
        [each.value for each in best],
        color=look.line,
        linewidth=1.2,
        dashes=(4, 2),
    )
    if picture.logarithmic:
        _logarithmic(axes)
    dots: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 8, "markeredgecolor": look.ground}
    axes.plot(
        [p.bytes / 1e6 for p in picture.points], [p.value for p in picture.points], color=look.point, zorder=3, **dots
    )
    for spine in ("top", "right"):
        axes.spines[spine].set_visible(False)
    axes.grid(axis="y", linewidth=0.75, alpha=0.5)
    axes.set_axisbelow(True)
    axes.set_xlim(0, room * max(p.bytes for p in picture.points) / 1e6)
    axes.set_xlabel("weights on disk, MB")
    axes.set_ylabel(picture.axis)
    _label(axes, picture, text=look.text)


def _logarithmic(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: PLC0415

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _label(axes: Any, picture: Picture, *, text: str) -> None:
    """Writes names to the right of the points, moved apart where they would cover each other."""
    bottom, top = axes.get_ylim()
    figure = axes.get_figure()
    figure.canvas.draw()
    placed: list[tuple[float, float]] = []
    step = figure.dpi * 0.16
    for each in sorted(picture.points, key=lambda p: p.value):
        x, y = axes.transData.transform((each.bytes / 1e6, each.value))
        while any(abs(y - other) < step and abs(x - left) < 9 * step for left, other in placed):
            y += step / 4
        placed.append((x, y))
        value = axes.transData.inverted().transform((x, y))[1]
        axes.annotate(
            each.label,
            (each.bytes / 1e6, value),
            (8, 0),
            textcoords="offset points",
            va="center",
            color=text,
            annotation_clip=False,
            parse_math=False,
        )
    axes.set_ylim(bottom, top)


def _points(rows: Sequence[Row], values: Sequence[float | None]) -> tuple[Point, ...]:
    names = [row.name for row in rows]
    found = []
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        if value is not None and value < float("inf"):
            found.append(Point(index, row.label if names.count(row.name) > 1 else row.name, row.bytes, value))
    return tuple(found)
