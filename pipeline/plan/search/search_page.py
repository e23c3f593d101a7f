"""The page of a search: the best layouts as a table, and all fitting layouts as points of time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.figure import Figure

from foundation.html import html, join
from pipeline.evaluation.report import svg
from pipeline.evaluation.report.model_section import definitions
from pipeline.evaluation.report.page import headrace_page
from pipeline.plan.search.search import Candidate, Search

_MOST_POINTS = 2000


@dataclass(frozen=True)
class Table:
    """A table that is printed, and shown on the page."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(found: Search, best: Table, *, title: str, facts: Sequence[tuple[str, str]]) -> str:
    """The HTML document.

    Args:
        found: result of the search.
        best: table of the best layouts.
        title: title of the page.
        facts: (label, text) pairs about the run and the machine.
    """
    sections = html(
        "<section>\n<h2>Search</h2>\n{}\n</section>\n"
        "<section>\n<h2>Time against memory</h2>\n<figure>\n{}\n<figcaption>Layouts that fit, by closed"
        " formulas. The line is the Pareto front: no other layout is both faster and smaller.</figcaption>\n</figure>\n"
        '</section>\n<section>\n<h2>The best layouts</h2>\n<div class="scroll">{}</div>\n</section>',
        definitions(facts),
        _pareto(found),
        _table(best),
    )
    return headrace_page(title=title, heading=title, sections=[sections])


def _pareto(found: Search) -> Markup:
    points = found.fitting()[:_MOST_POINTS]
    front = found.pareto()
    with svg.settings():
        figure = Figure(figsize=(960 / 72, 380 / 72), layout="constrained")
        axes = figure.add_subplot()
        for number, engine in enumerate(("torch", "deepspeed")):
            own = [each for each in points if each.run.config.engine == engine]
            axes.scatter(
                _memory(own), _seconds(own), s=9, color=svg.color(number), alpha=0.5, label=engine, linewidths=0
            )
        axes.step(_memory(front), _seconds(front), where="pre", color=svg.TEXT, linewidth=1.2)
        axes.scatter(_memory(front), _seconds(front), s=22, color=svg.TEXT, zorder=3, label="Pareto front")
        axes.set_xlabel("peak memory of a rank, GB")
        axes.set_ylabel("seconds per step")
        axes.set_yscale("log")
        axes.grid(visible=True, linewidth=0.6)
        axes.legend(frameon=False)
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        return svg.inline(figure, name="pareto", label="Seconds per step against peak memory of the layouts that fit")


def _memory(candidates: Sequence[Candidate]) -> list[float]:
    return [each.peak / 1e9 for each in candidates]


def _seconds(candidates: Sequence[Candidate]) -> list[float]:
    return [each.step_s for each in candidates]


def _table(table: Table) -> Markup:
    head = join(html("<th>{}</th>", name) for name in table.head)
    rows = join(
        html("<tr><th>{}</th>{}</tr>", row[0], join(html("<td>{}</td>", cell) for cell in row[1:]))
        for row in table.rows
    )
    return html("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>", head, rows)
