"""Renders the HTML page: self-contained, from the template page.html and the style sheet page.css."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from headrace.base.directory import code_version
from pipeline.evaluation.complete import TEMPERATURE, TOP_P
from pipeline.report import svg
from pipeline.report.charts import Chart, draw, name_label, value_label
from pipeline.report.curves import Group, cut_remark, groups, loss_chart, remarks, side_charts
from pipeline.report.facts import SHORT, facts
from pipeline.report.inputs import Inputs
from pipeline.report.models import COLUMNS, Measured, scope, where
from pipeline.report.runs import RunRecord

_HERE = Path(__file__).parent


def page(inputs: Inputs, measured: Sequence[Measured], completion: str | None) -> str:
    """The HTML document; all text from inputs is escaped."""
    template = Template((_HERE / "page.html").read_text(encoding="utf-8"))
    names = [model.name for model in inputs.models] or [run.name for run in inputs.runs]
    return template.substitute(
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        title=escape(", ".join(names)),
        heading=_heading(inputs),
        models=_models(inputs, measured),
        completion=_completion(inputs, completion),
        runs=_runs(inputs),
        code=escape(_code()),
    )


def _heading(inputs: Inputs) -> str:
    if not inputs.models:
        return "Runs" if len(inputs.runs) > 1 else "A run"
    return "Models and the runs that made them" if inputs.runs else "Models"


def _models(inputs: Inputs, measured: Sequence[Measured]) -> str:
    """The section of the models: their table, and how each column is measured. Empty for a report of runs alone."""
    if inputs.data is None:
        return ""
    scored = f"Scored: {escape(scope(measured, inputs.data))}. On {escape(where(measured))}."
    how = _definitions([(", ".join(filter(None, (c.head, c.unit))), c.how) for c in COLUMNS])
    return (
        "<section>\n<h2>Models</h2>\n"
        '<div class="scroll" tabindex="0" role="region" aria-label="Models">\n'
        f"<table>\n{_model_table(measured)}\n</table>\n</div>\n"
        f'<p class="note">{scored} Each model was loaded from its folder in a process of its own.</p>\n'
        f'<div class="how">\n{how}\n</div>\n</section>'
    )


def _runs(inputs: Inputs) -> str:
    """The sections of the runs: their curves, and a summary of each. Empty for a report of models alone."""
    if not inputs.runs:
        return ""
    curves = "\n".join(_group(group, alone=len(inputs.runs) == 1) for group in groups(inputs.runs))
    runs = "\n".join(_run(place, run, inputs) for place, run in enumerate(inputs.runs))
    return (
        f"<section>\n<h2>Training</h2>\n{curves}\n</section>\n"
        f'<section>\n<h2>Runs</h2>\n<div class="runs">\n{runs}\n</div>\n</section>'
    )


def _model_table(measured: Sequence[Measured]) -> str:
    heads = "".join(f'<th scope="col">{escape(c.head)}<small>{escape(c.unit)}</small></th>' for c in COLUMNS)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(one.name)}</th>{"".join(f"<td>{escape(c.show(one))}</td>" for c in COLUMNS)}</tr>'
        for one in measured
    )
    return f'<thead><tr><th scope="col">model</th>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>'


def _completion(inputs: Inputs, completion: str | None) -> str:
    if completion is None or inputs.prompt is None:
        return ""
    added = completion.removeprefix(inputs.prompt)
    # decoding may not reproduce the prompt exactly: then it is not highlighted
    prompt = f"<b>{escape(inputs.prompt)}</b>" if added != completion else ""
    name, most = escape(inputs.models[-1].name), inputs.tokens
    how = f"temperature {TEMPERATURE}, top-p {TOP_P}, seed 0"
    note = f"The prompt is <b>bold</b>. {name} continues it by up to {most} tokens, sampled with {how}."
    return f"<section>\n<h2>Completion</h2>\n<pre>{prompt}{escape(added)}</pre>\n<p class=note>{note}</p>\n</section>"


def _group(group: Group, *, alone: bool) -> str:
    """Legend, the loss chart in a wide and a narrow version of which the style sheet shows one, and small charts."""
    loss = loss_chart(group)
    wide = draw(loss, width=960, height=340, label=name_label)
    narrow = draw(loss, width=360, height=280, variant="-narrow", label=value_label)
    drawings = f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
    legend = "" if alone else f'<ul class="legend">{"".join(_legend(place, run) for place, run in group.runs)}</ul>'
    return "\n".join([legend, _figure(loss, drawings, remarks(group, loss)), _small(side_charts(group))])


def _small(charts: Sequence[Chart]) -> str:
    figures = [_figure(chart, draw(chart, width=306, height=200), cut_remark(chart)) for chart in charts]
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
    pairs = facts(run, [model.folder for model in inputs.models])
    return f"<article>\n<h3>{_swatch(place)}{escape(run.name)}</h3>\n{_definitions(pairs)}\n</article>"


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    items = "\n".join(f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in pairs)
    return f"<dl>\n{items}\n</dl>"


def _code() -> str:
    code = code_version()
    return f"headrace {code['headrace']}" + (f", commit {code['commit'][:SHORT]}" if code["commit"] else "")
