"""The sections on models: tables, pictures, samples, lineage, hardware, and the data to download."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from foundation.directory import MANIFEST, read_manifest
from foundation.html import NOTHING, html, join
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


def model_sections(inputs: Inputs, rows: Sequence[Row]) -> Markup:
    """The sections on models; empty for a report with runs only."""
    if inputs.comparison is None:
        return NOTHING
    measured = [row for row in rows if row.not_run is None]
    parts = [_models(inputs, rows), *_generation(measured), *_sources(measured), _pictures(rows)]
    parts += [_samples(inputs, measured), _lineages(rows), _hardware(measured)]
    return join(filter(None, parts), between="\n")


def definitions(pairs: Iterable[tuple[str, str]]) -> Markup:
    """A list of terms and texts."""
    items = (html("<div><dt>{}</dt><dd>{}</dd></div>", term, text) for term, text in pairs)
    return html("<dl>\n{}\n</dl>", join(items, between="\n"))


def _section(heading: str, *parts: Markup) -> Markup:
    return html("<section>\n<h2>{}</h2>\n{}\n</section>", heading, join(filter(None, parts), between="\n"))


def _note(text: str | Markup) -> Markup:
    return html('<p class="note">{}</p>', text)


def _models(inputs: Inputs, rows: Sequence[Row]) -> Markup:
    assert inputs.comparison is not None
    compared = next((row.positions for row in rows if row.positions), 0)
    scored = f"Scored: {scope(rows, inputs.comparison.data)}. On {where(rows)}."
    scored += f" KL and top-1 agreement over {compared:,} positions, to {rows[0].name}."
    note = _note(f"{scored} Each model was loaded from its folder in a process of its own.")
    return _section(
        "Models", _table(rows, COLUMNS, label="Models"), note, *_not_run(rows), _downloads(rows), _how(COLUMNS)
    )


def _not_run(rows: Sequence[Row]) -> Iterator[Markup]:
    for row in rows:
        if row.not_run is not None:
            yield _note(f"{row.name} with {row.consumer} was not run: {row.not_run}.")


def _downloads(rows: Sequence[Row]) -> Markup:
    """Links that contain the data."""

    def link(name: str, kind: str, text: str) -> Markup:
        data = base64.b64encode(text.encode()).decode()
        return html('<a download="{name}" href="data:{kind};base64,{data}">{name}</a>', name=name, kind=kind, data=data)

    links = [link("models.csv", "text/csv", as_csv(rows)), link("models.json", "application/json", as_json(rows))]
    return _note(html("All figures, to download: {}.", join(links, between=", ")))


def _generation(rows: Sequence[Row]) -> Iterator[Markup]:
    batches = batches_of(rows)
    if not batches:
        return
    columns = generation_columns(batches)
    made = next(each for row in rows for each in row.generation)
    lengths = f"Prompts of {made.prompt_tokens} tokens, {made.new_tokens} new tokens"
    note = f"{lengths}, greedy decoding, each model in a process of its own."
    if not all(each.peak_of_batch for row in rows for each in row.generation):
        note += " The kernel did not allow to start the high-water mark anew: peak memory is since the process began."
    yield _section("Generation", _table(rows, columns, label="Generation"), _note(note), _how(columns[1:3]))


def _sources(rows: Sequence[Row]) -> Iterator[Markup]:
    names = sources_of(rows)
    if len(names) > 1:
        note = _note("Nats per token over the windows of each source of the corpus.")
        yield _section("Held-out loss by source", _table(rows, source_columns(names), label="Sources"), note)


def _pictures(rows: Sequence[Row]) -> Markup:
    figures = list(filter(None, [size_quality_figure(rows), *sensitivity_figures(rows)]))
    return _section("Size and quality", *figures) if figures else NOTHING


def _samples(inputs: Inputs, rows: Sequence[Row]) -> Markup:
    """The same prompts, continued by each model, side by side."""
    if not inputs.prompts:
        return NOTHING
    assert inputs.comparison is not None
    parts = []
    for number, prompt in enumerate(inputs.prompts):
        cells = (
            html("<article>\n<h3>{}</h3>\n<pre><b>{}</b>{}</pre>\n</article>", row.label, prompt, row.samples[number])
            for row in rows
            if number < len(row.samples)
        )
        parts.append(html('<div class="samples">\n{}\n</div>', join(cells, between="\n")))
    most = inputs.comparison.wanted.sample_tokens
    how = f"by up to {most} tokens, by greedy decoding, up to the end of the text"
    return _section("Samples", join(parts), _note(html("The prompt is <b>bold</b>. Each model continues it {}.", how)))


def _lineages(rows: Sequence[Row]) -> Markup:
    first: dict[Path, Row] = {}
    for row in rows:
        first.setdefault(row.path, row)
    shown = (
        html("<article>\n<h3>{}</h3>\n{}\n</article>", row.name, definitions(_lineage(row))) for row in first.values()
    )
    return _section("Lineage", html('<div class="runs">\n{}\n</div>', join(shown, between="\n")))


def _lineage(row: Row) -> Iterator[tuple[str, str]]:
    """Corpora, and every step with its most important numbers."""
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


def _hardware(rows: Sequence[Row]) -> Markup:
    return _section("Measured on", definitions(hardware(rows)))


def _how(columns: Sequence[Column]) -> Markup:
    shown = definitions([(", ".join(filter(None, (c.head, c.unit))), c.how) for c in columns])
    return html('<details class="how"><summary>How each column is measured</summary>\n{}\n</details>', shown)


def _table(rows: Sequence[Row], columns: Sequence[Column], *, label: str) -> Markup:
    heads = join(html('<th scope="col">{}<small>{}</small></th>', c.head, c.unit) for c in columns)
    lines = (
        html('<tr><th scope="row">{}</th>{}</tr>', row.name, join(html("<td>{}</td>", c.show(row)) for c in columns))
        for row in rows
    )
    return html(
        '<div class="scroll" tabindex="0" role="region" aria-label="{}">\n'
        '<table>\n<thead><tr><th scope="col">model</th>{}</tr></thead>\n<tbody>\n{}\n</tbody>\n</table>\n</div>',
        label,
        heads,
        join(lines, between="\n"),
    )
