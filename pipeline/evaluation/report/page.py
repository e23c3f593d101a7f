"""Renders the HTML page: self-contained, from the template page.html and the style sheet page.css."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from headrace.base.directory import code_version
from pipeline.evaluation.comparison.rows import Row
from pipeline.evaluation.report import svg
from pipeline.evaluation.report.charts import Chart, Label, draw, name_label, value_label
from pipeline.evaluation.report.curves import CurveGroup, cut_remark, groups, loss_chart, remarks, side_charts
from pipeline.evaluation.report.facts import SHORT, facts
from pipeline.evaluation.report.goodput_section import goodput_section
from pipeline.evaluation.report.inputs import Inputs
from pipeline.evaluation.report.interactive import data_script, plot
from pipeline.evaluation.report.model_section import definitions, model_sections
from pipeline.evaluation.report.runs import RunRecord

_HERE = Path(__file__).parent
_HINT = (
    '<p class="note hint" hidden>Point at a curve for its values; drag over a part to zoom, double-click to go back.'
    "</p>"
)


def page(inputs: Inputs, rows: Sequence[Row]) -> str:
    """The HTML document; all text from inputs is escaped."""
    template = Template((_HERE / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        title=escape(", ".join(inputs.names)),
        heading=_heading(inputs),
        models=model_sections(inputs, rows),
        runs=_runs(inputs),
        data=data_script([chart for group in _groups(inputs) for chart in (loss_chart(group), *side_charts(group))]),
        script=(_HERE / "page.js").read_text(encoding="utf-8"),
        code=escape(code_text()),
    )


def _groups(inputs: Inputs) -> list[CurveGroup]:
    return groups(inputs.runs) if inputs.runs else []


def _heading(inputs: Inputs) -> str:
    if inputs.comparison is None:
        return "Runs" if len(inputs.runs) > 1 else "A run"
    return "Models and the runs that made them" if inputs.runs else "Models"


def _runs(inputs: Inputs) -> str:
    """The sections of the runs: their curves, goodput, and a summary of each. Empty for a report of models alone."""
    if not inputs.runs:
        return ""
    curves = "\n".join(_group(group, alone=len(inputs.runs) == 1) for group in _groups(inputs))
    runs = "\n".join(_run(place, run, inputs) for place, run in enumerate(inputs.runs))
    return (
        f"<section>\n<h2>Training</h2>\n{_HINT}\n{curves}\n</section>\n"
        f"{goodput_section(inputs.runs)}\n"
        f'<section>\n<h2>Runs</h2>\n<div class="runs">\n{runs}\n</div>\n</section>'
    )


def _group(group: CurveGroup, *, alone: bool) -> str:
    """Legend, the loss chart in a wide and a narrow version of which the style sheet shows one, and small charts."""
    loss = loss_chart(group)
    wide = _plot(loss, width=960, height=340, label=name_label)
    narrow = _plot(loss, width=360, height=280, variant="-narrow", label=value_label)
    drawings = f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
    legend = "" if alone else f'<ul class="legend">{"".join(_legend(place, run) for place, run in group.runs)}</ul>'
    return "\n".join([legend, _figure(loss, drawings, remarks(group, loss)), _small(side_charts(group))])


def _plot(chart: Chart, *, width: int, height: int, variant: str = "", label: Label | None = None) -> str:
    drawing = draw(chart, width=width, height=height, variant=variant, label=label)
    return plot(chart, drawing, width=width, height=height, label=label)


def _small(charts: Sequence[Chart]) -> str:
    figures = [_figure(chart, _plot(chart, width=306, height=200), cut_remark(chart)) for chart in charts]
    layout = "small" if len(figures) % 3 == 0 else "small pairs"
    return f'<div class="{layout}">\n{"".join(figures)}\n</div>'


def _figure(chart: Chart, drawing: str, notes: Iterable[str] = ()) -> str:
    text = escape(" ".join(notes))
    note = f"<figcaption>{text}</figcaption>" if text else ""
    return f"<figure>\n<h3>{escape(chart.title)}</h3>\n{drawing}\n{note}</figure>"


def _legend(place: int, run: RunRecord) -> str:
    return f"<li>{_swatch(place)}{escape(run.name)}</li>"


def _swatch(place: int) -> str:
    dashes = " ".join(f"{1.8 * length:g}" for length in svg.dash(place))
    look = f"stroke:var(--series-{place % len(svg.SERIES) + 1});stroke-width:1.8;stroke-dasharray:{dashes or 'none'}"
    return f'<svg class="swatch" viewBox="0 0 28 8" aria-hidden="true"><path d="M0 4H28" style="{look}"/></svg>'


def _run(place: int, run: RunRecord, inputs: Inputs) -> str:
    pairs = facts(run, inputs.folders)
    return f"<article>\n<h3>{_swatch(place)}{escape(run.name)}</h3>\n{definitions(pairs)}\n</article>"


def code_text() -> str:
    """The version of the code that writes a page."""
    code = code_version()
    return f"headrace {code['headrace']}" + (f", commit {code['commit'][:SHORT]}" if code["commit"] else "")
