"""The sections of the models: tables, pictures, samples, lineage, hardware, and the data to download."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from headrace.base.directory import MANIFEST, read_manifest
from pipeline.evaluation.comparison.rows import Row, as_csv, as_json
from pipeline.evaluation.comparison.table import (
    COLUMNS,
    Column,
    batches_of,
    generation_columns,
    source_columns,
    sources_of,
)
from pipeline.evaluation.report.inputs import Inputs
from pipeline.evaluation.report.scope import hardware, scope, where
from pipeline.evaluation.report.size_quality import sensitivity_figures, size_quality_figure
from pipeline.models.card.lineage import lineage_of
from pipeline.models.card.steps_text import SHORT


def model_sections(inputs: Inputs, rows: Sequence[Row]) -> str:
    """All of them; empty for a report of runs alone."""
    if inputs.comparison is None:
        return ""
    measured = [row for row in rows if row.not_run is None]
    parts = [_models(inputs, rows), *_generation(measured), *_sources(measured), _pictures(rows)]
    parts += [_samples(inputs, measured), _lineages(rows), _hardware(measured)]
    return "\n".join(filter(None, parts))


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of terms and texts."""
    items = "\n".join(f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in pairs)
    return f"<dl>\n{items}\n</dl>"


def _models(inputs: Inputs, rows: Sequence[Row]) -> str:
    assert inputs.comparison is not None
    compared = next((row.positions for row in rows if row.positions), 0)
    scored = f"Scored: {escape(scope(rows, inputs.comparison.data))}. On {escape(where(rows))}."
    scored += f" KL and top-1 agreement over {compared:,} positions, to {escape(rows[0].name)}."
    return (
        "<section>\n<h2>Models</h2>\n"
        f"{_table(rows, COLUMNS, label='Models')}\n"
        f'<p class="note">{scored} Each model was loaded from its folder in a process of its own.</p>\n'
        f"{_not_run(rows)}{_downloads(rows)}\n{_how(COLUMNS)}\n</section>"
    )


def _not_run(rows: Sequence[Row]) -> str:
    lines = [f"{row.name} with {row.consumer} was not run: {row.not_run}." for row in rows if row.not_run is not None]
    return "".join(f'<p class="note">{escape(line)}</p>\n' for line in lines)


def _downloads(rows: Sequence[Row]) -> str:
    """Links that hold the data themselves."""

    def link(name: str, kind: str, text: str) -> str:
        data = base64.b64encode(text.encode()).decode()
        return f'<a download="{name}" href="data:{kind};base64,{data}">{name}</a>'

    links = [link("models.csv", "text/csv", as_csv(rows)), link("models.json", "application/json", as_json(rows))]
    return f'<p class="note">All figures, to download: {", ".join(links)}.</p>'


def _generation(rows: Sequence[Row]) -> Iterator[str]:
    batches = batches_of(rows)
    if not batches:
        return
    columns = generation_columns(batches)
    made = next(each for row in rows for each in row.generation)
    lengths = f"Prompts of {made.prompt_tokens} tokens, {made.new_tokens} new tokens"
    note = f"{lengths}, greedy decoding, each model in a process of its own."
    if not all(each.peak_of_batch for row in rows for each in row.generation):
        note += " The kernel did not allow to start the high-water mark anew: peak memory is since the process began."
    yield (
        f"<section>\n<h2>Generation</h2>\n{_table(rows, columns, label='Generation')}\n"
        f'<p class="note">{note}</p>\n{_how(columns[1:3])}\n</section>'
    )


def _sources(rows: Sequence[Row]) -> Iterator[str]:
    names = sources_of(rows)
    if len(names) > 1:
        yield (
            f"<section>\n<h2>Held-out loss by source</h2>\n{_table(rows, source_columns(names), label='Sources')}\n"
            '<p class="note">Nats per token over the windows of each source of the corpus.</p>\n</section>'
        )


def _pictures(rows: Sequence[Row]) -> str:
    figures = [size_quality_figure(rows), *sensitivity_figures(rows)]
    shown = "\n".join(filter(None, figures))
    return f"<section>\n<h2>Size and quality</h2>\n{shown}\n</section>" if shown else ""


def _samples(inputs: Inputs, rows: Sequence[Row]) -> str:
    """The same prompts, continued by each model, side by side."""
    if not inputs.prompts:
        return ""
    assert inputs.comparison is not None
    parts = []
    for number, prompt in enumerate(inputs.prompts):
        cells = "\n".join(
            f"<article>\n<h3>{escape(row.label)}</h3>\n"
            f"<pre><b>{escape(prompt)}</b>{escape(row.samples[number])}</pre>\n</article>"
            for row in rows
            if number < len(row.samples)
        )
        parts.append(f'<div class="samples">\n{cells}\n</div>')
    most = inputs.comparison.wanted.sample_tokens
    how = f"by up to {most} tokens, by greedy decoding, up to the end of the text"
    note = f"The prompt is <b>bold</b>. Each model continues it {how}."
    return f'<section>\n<h2>Samples</h2>\n{"".join(parts)}\n<p class="note">{note}</p>\n</section>'


def _lineages(rows: Sequence[Row]) -> str:
    first: dict[Path, Row] = {}
    for row in rows:
        first.setdefault(row.path, row)
    shown = "\n".join(
        f"<article>\n<h3>{escape(row.name)}</h3>\n{definitions(_lineage(row))}\n</article>" for row in first.values()
    )
    return f'<section>\n<h2>Lineage</h2>\n<div class="runs">\n{shown}\n</div>\n</section>'


def _lineage(row: Row) -> Iterator[tuple[str, str]]:
    """Corpora, and every step with its most telling numbers."""
    lineage = lineage_of(row.path)
    for corpus in lineage["corpora"]:
        tokens = f", {corpus['tokens']:,} training tokens" if corpus.get("tokens") else ""
        sources = ", ".join(each["name"] for each in corpus.get("sources") or [])
        yield "corpus", f"{corpus['fingerprint'][:SHORT]}{tokens}" + (f": {sources}" if sources else "")
    for step in lineage["steps"]:
        yield str(step["step"]), _step(step)
    yield "scheme", row.scheme
    if (row.path / MANIFEST).is_file():
        yield "fingerprint", read_manifest(row.path, kind="model").fingerprint[:SHORT]
    yield "folder", str(row.path)


def _step(step: dict[str, object]) -> str:
    names = {
        "tokens": "{:,} tokens",
        "optimizer_steps": "{:,} steps",
        "optimizer": "{}",
        "learning_rate": "learning rate {:g}",
        "precision": "{}",
        "scheme": "{}",
        "method": "{}",
        "group_size": "group {}",
        "bits_per_quantized_weight": "{:.2f} bits per quantized weight",
        "what": "{}",
        "parameters_after": "{:,} parameters",
    }
    found = [pattern.format(step[key]) for key, pattern in names.items() if step.get(key) is not None]
    return ", ".join(found) or "no details recorded"


def _hardware(rows: Sequence[Row]) -> str:
    return f"<section>\n<h2>Measured on</h2>\n{definitions(hardware(rows))}\n</section>"


def _how(columns: Sequence[Column]) -> str:
    shown = definitions([(", ".join(filter(None, (c.head, c.unit))), c.how) for c in columns])
    return f'<details class="how"><summary>How each column is measured</summary>\n{shown}\n</details>'


def _table(rows: Sequence[Row], columns: Sequence[Column], *, label: str) -> str:
    heads = "".join(f'<th scope="col">{escape(c.head)}<small>{escape(c.unit)}</small></th>' for c in columns)
    lines = "\n".join(
        f'<tr><th scope="row">{escape(row.name)}</th>{"".join(f"<td>{escape(c.show(row))}</td>" for c in columns)}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">\n'
        f'<table>\n<thead><tr><th scope="col">model</th>{heads}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody>\n</table>\n</div>"
    )
