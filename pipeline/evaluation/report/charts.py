"""Line charts of metrics over training tokens, as inline SVG. One unit of a chart is one CSS pixel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, FuncFormatter, MaxNLocator, ScalarFormatter

from pipeline.evaluation.report import svg
from pipeline.evaluation.report.runs import Series, StageBand
from pipeline.evaluation.report.series import settled, smooth, smoothing_window, thin

_PIXELS_PER_INCH = 72  # of matplotlib's SVG
_LABEL_PIXELS = 7.2  # mean width of a character of a label
_LABEL_CHARACTERS = 22
_EMPTY = np.empty(0)


@dataclass(frozen=True)
class ChartLine:
    """One run's metric in a chart.

    Attributes:
        index: index of the run in the report; selects color and dash.
        name: name of the run.
        x: tokens of each point, float64 [n], n >= 1.
        y: values, float64 [n]; values that are not finite are left out.
        marks: held-out evaluations as (x, y), float64 [m] each.
    """

    index: int
    name: str
    x: Series
    y: Series
    marks: tuple[Series, Series] = (_EMPTY, _EMPTY)


Label = Callable[[ChartLine], str]


@dataclass(frozen=True)
class Chart:
    """Contents of a chart.

    Attributes:
        name: unique on the page, for ids: letters, digits and hyphens, no text from an input.
        title: title, with the unit.
        lines: one line or more.
        show: format of a value on the y axis; None for plain decimals.
        cut: whether values of the first steps may be above the chart.
        from_zero: whether the y axis starts at 0.
        smoothed: whether to draw a moving mean; not for metrics without noise.
        bands: stages that all runs of the chart share, drawn behind the lines.
    """

    name: str
    title: str
    lines: Sequence[ChartLine]
    show: Callable[[float], str] | None = None
    cut: bool = False
    from_zero: bool = False
    smoothed: bool = True
    bands: Sequence[StageBand] = ()

    def highest(self) -> float:
        """The largest value, within the chart or above it."""
        return max((float(values.max()) for line in self.lines if (values := _finite(line.y)).size), default=0.0)

    def limits(self) -> tuple[float, float]:
        """Limits of the y axis, with a margin of 6 % above and below."""
        values = np.concatenate([settled(line.y) if self.cut else _finite(line.y) for line in self.lines])
        values = np.concatenate([values, *(_finite(line.marks[1]) for line in self.lines)])
        if not values.size:
            return 0.0, 1.0
        low, high = (0.0 if self.from_zero else float(values.min())), float(values.max())
        margin = 0.06 * ((high - low) or abs(high) or 1.0)
        return (low if self.from_zero else low - margin), high + margin

    def cut_off(self) -> float | None:
        """The largest value above the chart, or None if all are within."""
        return self.highest() if self.highest() > self.limits()[1] else None


def draw(chart: Chart, *, width: int, height: int, variant: str = "", label: Label | None = None) -> Markup:
    """Draws a chart as an `<svg>` element.

    Args:
        chart: contents of the chart.
        width, height: CSS pixels at scale 1; the element scales with its container.
        variant: appended to the chart's name if it is drawn in several sizes.
        label: text beside the last point of each line; None for no labels.
    """
    with svg.settings():
        figure = Figure(figsize=(width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH))
        figure.patch.set_visible(False)
        labels = [label(line) for line in chart.lines] if label else []
        left, top, right, bottom = plot_area(chart, width=width, height=height, label=label)
        wide, high = right - left, bottom - top
        axes = figure.add_axes((left / width, 1 - bottom / height, wide / width, high / height))
        _frame(axes, chart, width=wide, height=high)
        _bands(axes, chart, width=wide)
        for line in chart.lines:
            _line(axes, line, smoothed=chart.smoothed)
        if labels:
            _write_labels(axes, chart, labels, gap=15 / high)
        return svg.inline(figure, name=chart.name + variant, label=f"{chart.title}, over tokens")


def plot_area(chart: Chart, *, width: int, height: int, label: Label | None) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the axes within a drawing, in pixels from its upper left corner."""
    labels = [label(line) for line in chart.lines] if label else []
    room = 10 + _LABEL_PIXELS * max(map(len, labels)) if labels else 14
    return 42, 8, width - room, height - 40


def tokens(value: float, _position: int | None = None) -> str:
    """A count of tokens in at most a few characters: 0, 800, 12k, 1.5M, 3B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _frame(axes: Axes, chart: Chart, *, width: float, height: float) -> None:
    axes.patch.set_visible(False)
    for side in ("left", "top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", linewidth=0.75)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=6)
    axes.set_ylim(*chart.limits())
    # from 0, not from the first step: the origin is the start of training
    axes.set_xlim(0, 1.02 * max(line.x[-1] for line in chart.lines))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=max(2, int(width // 90)), steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=max(3, int(height // 32)), steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(tokens))
    axes.yaxis.set_major_formatter(_y_formatter(chart))
    axes.set_xlabel("tokens", loc="right", labelpad=2)


def _bands(axes: Axes, chart: Chart, *, width: float) -> None:
    """Shades every second stage, and writes the names of those with room for it at the top."""
    right = axes.get_xlim()[1]
    for number, band in enumerate(chart.bands):
        begin, end = band.begin / right, min(1.0, band.end / right)
        if begin >= 1:
            break
        if number % 2 == 0:
            axes.axvspan(band.begin, min(right, band.end), facecolor=svg.GRID, edgecolor="none", alpha=0.5, zorder=0)
        if (end - begin) * width >= _LABEL_PIXELS * len(band.name):
            place: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "top", "parse_math": False}
            axes.text((begin + end) / 2, 0.99, band.name, fontsize=11, **place)


def _y_formatter(chart: Chart) -> Formatter:
    if (show := chart.show) is not None:
        return FuncFormatter(lambda value, _: show(value))
    plain = ScalarFormatter(useOffset=False)  # all ticks get as many decimals as any tick needs
    plain.set_scientific(False)
    return plain


def _line(axes: Axes, line: ChartLine, *, smoothed: bool) -> None:
    """A thin line of all steps, a thick line of their moving mean, and held-out evaluations as points."""
    color, window = svg.color(line.index), smoothing_window(line.y.size) if smoothed else 1
    x = thin(line.x)
    look: dict[str, Any] = {"color": color, "solid_capstyle": "round", "solid_joinstyle": "round"}
    if _finite(line.y).size == 1:  # a single point gives no line
        look |= {"marker": "o", "markersize": 5, "markerfacecolor": svg.GROUND}
    if window > 1:
        axes.plot(x, thin(line.y), linewidth=0.8, alpha=0.4, **look)
    strong = axes.plot(x, thin(smooth(line.y, window=window)), linewidth=1.8, **look)[0]
    if svg.dash(line.index):
        strong.set_dashes(svg.dash(line.index))
    axes.plot(
        *line.marks,
        linestyle="none",
        marker="o",
        markersize=6.5,
        markerfacecolor=color,
        markeredgecolor=svg.GROUND,
        markeredgewidth=1.5,
        clip_on=False,
        zorder=3,
    )


def value_label(line: ChartLine) -> str:
    """The last held-out value, or else the last value."""
    return f"{_last(line):.2f}" if np.isfinite(_last(line)) else ""


def name_label(line: ChartLine) -> str:
    """The run's name, shortened, and its last value."""
    name = line.name if len(line.name) <= _LABEL_CHARACTERS else line.name[: _LABEL_CHARACTERS - 1] + "…"
    return f"{name} {value_label(line)}".rstrip()


def _last(line: ChartLine) -> float:
    for values in (_finite(line.marks[1]), _finite(line.y)):
        if values.size:
            return float(values[-1])
    return float("nan")


def _write_labels(axes: Axes, chart: Chart, labels: list[str], *, gap: float) -> None:
    """Writes labels beside the lines' last points, spread apart; `gap` is a text line's height in axes heights."""
    low, high = chart.limits()
    wanted = [(_last(line) - low) / (high - low) if np.isfinite(_last(line)) else 1.0 for line in chart.lines]
    for line, text, y in zip(chart.lines, labels, spread(wanted, gap=gap), strict=True):
        how: dict[str, Any] = {"textcoords": "offset points", "va": "center", "parse_math": False}
        place = (line.x[-1], low + y * (high - low))
        axes.annotate(text, place, (8, 0), color=svg.color(line.index), annotation_clip=False, **how)


def spread(wanted: Sequence[float], *, gap: float) -> list[float]:
    """Positions close to `wanted`, in the same order, at least `gap` apart and none below half a gap."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # a stack of labels is centered on its values: its lowest label starts half of the stack's height below
    placed, floor = [0.0] * len(wanted), gap / 2
    for rank, i in enumerate(order):
        above = sum(1 for j in order[rank + 1 :] if wanted[j] - wanted[i] < gap)
        placed[i] = max(floor, wanted[i] - above * gap / 2)
        floor = placed[i] + gap
    return placed


def _finite(values: Series) -> Series:
    return values[np.isfinite(values)]
