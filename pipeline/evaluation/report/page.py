"""Renders the report as one self-contained HTML page, with the style sheet page.css and the script page.js."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from foundation.directory import code_version
from foundation.html import NOTHING, document, html, join
from pipeline.evaluation.comparison.rows import Row
from pipeline.evaluation.report import svg
from pipeline.evaluation.report.branches_section import branches_section
from pipeline.evaluation.report.charts import Chart, ChartLine, Label, draw, name_label, plot_area, value_label
from pipeline.evaluation.report.curves import CurveGroup, cut_remark, groups, loss_chart, remarks, side_charts
from pipeline.evaluation.report.facts import SHORT, facts
from pipeline.evaluation.report.goodput_section import goodput_section
from pipeline.evaluation.report.inputs import Inputs
from pipeline.evaluation.report.model_section import definitions, model_sections
from pipeline.evaluation.report.runs import RunRecord, Series
from pipeline.evaluation.report.series import smooth, smoothing_window, thin

_HERE = Path(__file__).parent
_HINT = Markup(
    '<p class="note hint" hidden>Point at a curve for its values; drag over a part to zoom, double-click to go back.'
    ' <button type="button" class="axis">show hours on the x axis</button></p>'
)
POINTS = 2000
"""Points per line in the script's data: more than are drawn, for zooming in."""


def page(inputs: Inputs, rows: Sequence[Row]) -> str:
    """The HTML document of a report."""
    charts = [chart for group in _groups(inputs) for chart in (loss_chart(group), *side_charts(group))]
    return headrace_page(
        title=", ".join(inputs.names),
        heading=_heading(inputs),
        sections=[model_sections(inputs, rows), _runs(inputs)],
        data=data_script(charts, inputs.runs),
        script=(_HERE / "page.js").read_text(encoding="utf-8"),
    )


def headrace_page(
    *, title: str, heading: str, sections: Iterable[Markup], data: Markup = NOTHING, script: str = ""
) -> str:
    """An HTML document with a report's style.

    Args:
        title: title that the browser shows after the project's name.
        heading: the page's first line.
        sections: contents, in this order.
        data: an element with the data that `script` reads.
        script: JavaScript of the page.
    """
    body = html(
        '<main>\n<header>\n<p class="brand">Headrace</p>\n<h1>{}</h1>\n</header>\n{}\n'
        "<footer>Written by {}.</footer>\n</main>\n{}",
        heading,
        join(sections, between="\n"),
        code_text(),
        data,
    )
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    return document(title=f"Headrace: {title}", style=style, body=body, script=script)


def _groups(inputs: Inputs) -> list[CurveGroup]:
    return groups(inputs.runs) if inputs.runs else []


def _heading(inputs: Inputs) -> str:
    if inputs.comparison is None:
        return "Runs" if len(inputs.runs) > 1 else "A run"
    return "Models and the runs that made them" if inputs.runs else "Models"


def _runs(inputs: Inputs) -> Markup:
    """The sections on runs: curves, branches, goodput, a summary of each. Empty for a report with models only."""
    if not inputs.runs:
        return NOTHING
    curves = join((_group(group, alone=len(inputs.runs) == 1) for group in _groups(inputs)), between="\n")
    runs = join((_run(place, run, inputs) for place, run in enumerate(inputs.runs)), between="\n")
    return html(
        "<section>\n<h2>Training</h2>\n{}\n{}\n</section>\n{}\n{}\n"
        '<section>\n<h2>Runs</h2>\n<div class="runs">\n{}\n</div>\n</section>',
        _HINT,
        curves,
        branches_section(inputs.runs),
        goodput_section(inputs.runs),
        runs,
    )


def _group(group: CurveGroup, *, alone: bool) -> Markup:
    """Legend, loss chart and small charts. The style sheet shows the wide or the narrow version of the loss chart."""
    loss = loss_chart(group)
    wide = _plot(loss, width=960, height=340, label=name_label)
    narrow = _plot(loss, width=360, height=280, variant="-narrow", label=value_label)
    drawings = html('<div class="wide">{}</div><div class="narrow">{}</div>', wide, narrow)
    names = join(_legend(place, run) for place, run in group.runs)
    legend = NOTHING if alone else html('<ul class="legend">{}</ul>', names)
    return join([legend, _figure(loss, drawings, remarks(group, loss)), _small(side_charts(group))], between="\n")


def _plot(chart: Chart, *, width: int, height: int, variant: str = "", label: Label | None = None) -> Markup:
    drawing = draw(chart, width=width, height=height, variant=variant, label=label)
    return plot(chart, drawing, width=width, height=height, label=label)


def _small(charts: Sequence[Chart]) -> Markup:
    figures = [_figure(chart, _plot(chart, width=306, height=200), cut_remark(chart)) for chart in charts]
    layout = "small" if len(figures) % 3 == 0 else "small pairs"
    return html('<div class="{}">\n{}\n</div>', layout, join(figures))


def _figure(chart: Chart, drawing: Markup, notes: Iterable[str] = ()) -> Markup:
    text = " ".join(notes)
    note = html("<figcaption>{}</figcaption>", text) if text else NOTHING
    return html("<figure>\n<h3>{}</h3>\n{}\n{}</figure>", chart.title, drawing, note)


def _legend(place: int, run: RunRecord) -> Markup:
    return html("<li>{}{}</li>", _swatch(place), run.name)


def _swatch(place: int) -> Markup:
    dashes = " ".join(f"{1.8 * length:g}" for length in svg.dash(place))
    look = f"stroke:var(--series-{place % len(svg.SERIES) + 1});stroke-width:1.8;stroke-dasharray:{dashes or 'none'}"
    return html('<svg class="swatch" viewBox="0 0 28 8" aria-hidden="true"><path d="M0 4H28" style="{}"/></svg>', look)


def _run(place: int, run: RunRecord, inputs: Inputs) -> Markup:
    pairs = facts(run, inputs.folders)
    return html("<article>\n<h3>{}{}</h3>\n{}\n</article>", _swatch(place), run.name, definitions(pairs))


def code_text() -> str:
    """The version of the code that writes a page."""
    code = code_version()
    return f"headrace {code['headrace']}" + (f", commit {code['commit'][:SHORT]}" if code["commit"] else "")


def plot(chart: Chart, drawing: Markup, *, width: int, height: int, label: Label | None = None) -> Markup:
    """A drawing, with the numbers by which the script positions values in it."""
    area = ",".join(f"{value:g}" for value in plot_area(chart, width=width, height=height, label=label))
    return html('<div class="plot" data-chart="{}" data-area="{}">{}</div>', chart.name, area, drawing)


def data_script(charts: Sequence[Chart], runs: Sequence[RunRecord] = ()) -> Markup:
    """The numbers of all charts, as a JSON element of the page.

    Args:
        charts: the charts.
        runs: runs whose hours of training the script can draw instead of tokens, by the index of a chart's lines.
    """
    found: dict[str, Any] = {chart.name: _chart(chart) for chart in charts}
    found["clock"] = [
        [_numbers(thin(values, points=POINTS)) for values in (run.series("tokens"), run.hours())] for run in runs
    ]
    # text of a script element is not unescaped: "<" is written for JSON, as a tag within a name would end the element
    text = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return html('<script type="application/json" id="charts">{}</script>', Markup(text))


def _chart(chart: Chart) -> dict[str, Any]:
    right = 1.02 * max(float(line.x[-1]) for line in chart.lines)
    return {"x": [0, right], "y": list(chart.limits()), "lines": [_line(line, chart) for line in chart.lines]}


def _line(line: ChartLine, chart: Chart) -> dict[str, Any]:
    window = smoothing_window(line.y.size) if chart.smoothed else 1
    found: dict[str, Any] = {
        "name": line.name,
        "run": line.index,
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
