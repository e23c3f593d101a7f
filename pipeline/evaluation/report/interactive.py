"""The numbers behind the curves, for the script of the page: values under the pointer, and zoom.

Without the script, and on paper, the drawings stand as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from headrace.base.html import html
from pipeline.evaluation.report import svg
from pipeline.evaluation.report.charts import Chart, ChartLine, Label, plot_area
from pipeline.evaluation.report.runs import Series
from pipeline.evaluation.report.series import smooth, smoothing_window, thin

POINTS = 2000
"""Points of a line that the script has: more than are drawn, for zooming in."""


def plot(chart: Chart, drawing: Markup, *, width: int, height: int, label: Label | None = None) -> Markup:
    """A drawing with the numbers by which the script places values in it."""
    area = ",".join(f"{value:g}" for value in plot_area(chart, width=width, height=height, label=label))
    return html('<div class="plot" data-chart="{}" data-area="{}">{}</div>', chart.name, area, drawing)


def data_script(charts: Sequence[Chart]) -> Markup:
    """The numbers of all charts, as a JSON element of the page."""
    found = {chart.name: _chart(chart) for chart in charts}
    # text of a script element is not unescaped: a tag within a name, which would end the element, is written for JSON
    text = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return html('<script type="application/json" id="charts">{}</script>', Markup(text))


def _chart(chart: Chart) -> dict[str, Any]:
    right = 1.02 * max(float(line.x[-1]) for line in chart.lines)
    return {"x": [0, right], "y": list(chart.limits()), "lines": [_line(line, chart) for line in chart.lines]}


def _line(line: ChartLine, chart: Chart) -> dict[str, Any]:
    window = smoothing_window(line.y.size) if chart.smoothed else 1
    found: dict[str, Any] = {
        "name": line.name,
        "color": f"var(--series-{line.index % len(svg.SERIES) + 1})",
        "dash": " ".join(f"{1.8 * length:g}" for length in svg.dash(line.index)),
        "x": _numbers(thin(line.x, points=POINTS)),
        "y": _numbers(thin(smooth(line.y, window=window), points=POINTS)),
        "marks": [_numbers(line.marks[0]), _numbers(line.marks[1])],
    }
    return found | ({"raw": _numbers(thin(line.y, points=POINTS))} if window > 1 else {})


def _numbers(values: Series) -> list[float | None]:
    """Numbers of five significant digits; None for values that are not finite."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]
