"""The section on goodput: the use of each run's wall clock, as a bar for each attempt and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from markupsafe import Markup

from foundation.html import NOTHING, html, join
from pipeline.evaluation.report.facts import duration
from pipeline.evaluation.report.runs import RunRecord
from pipeline.runtime.goodput.account import AttemptTime, Goodput, TimeSpent, read_goodput
from pipeline.runtime.goodput.text import NAMES, percent
from pipeline.runtime.launch.run_lock import is_training

_MOST_BARS = 40
_NOTE = (
    "A bar is an attempt with the wait before it; its length is wall clock. Productive: the time of steps in the final"
    " history, less the losses listed below it. Straggler time is estimated from the straggler reports."
)


def goodput_section(runs: Sequence[RunRecord]) -> Markup:
    """The section; empty where no run has a step."""
    found = [(run, goodput) for run in runs if (goodput := read_goodput(run.path, training=is_training(run.path)))]
    if not found:
        return NOTHING
    figures = join((_figure(run.name, goodput) for run, goodput in found), between="\n")
    return html('<section>\n<h2>Goodput</h2>\n{}\n<p class="note">{}</p>\n</section>', figures, _NOTE)


def _figure(name: str, goodput: Goodput) -> Markup:
    return html(
        "<figure>\n<h3>{name}: {share} of {wall}</h3>\n"
        '<div class="scroll" tabindex="0" role="region" aria-label="Goodput of {name}">\n'
        "{bars}\n{table}\n</div>\n</figure>",
        name=name,
        share=percent(goodput.share),
        wall=duration(goodput.wall),
        bars=_bars(goodput),
        table=_table(goodput),
    )


def _bars(goodput: Goodput) -> Markup:
    """A stacked bar for each attempt; only the newest if there are very many."""
    shown = goodput.attempts[-_MOST_BARS:]
    longest = max(each.spent.wall for each in shown) or 1.0
    rows = join((_bar(each, longest) for each in shown), between="\n")
    earlier = len(goodput.attempts) - len(shown)
    head = "attempt" + (f" ({earlier} earlier ones are in the table only)" if earlier else "")
    return html(
        '<table class="bars"><thead><tr><th scope="col">{}</th><th scope="col"></th><th scope="col">wall clock'
        '</th><th scope="col">goodput</th></tr></thead>\n<tbody>{}</tbody></table>',
        head,
        rows,
    )


def _bar(attempt: AttemptTime, longest: float) -> Markup:
    parts = join(
        html(
            '<span class="spent-{}" style="width:{:.2f}%" title="{}: {}"></span>',
            name,
            100 * seconds / longest,
            NAMES[name],
            duration(seconds),
        )
        for name, seconds in asdict(attempt.spent).items()
        if seconds > 0
    )
    return html(
        '<tr><th scope="row">{}</th><td class="bar"><div class="stacked">{}</div></td><td>{}</td><td>{}</td></tr>',
        attempt.number,
        parts,
        duration(attempt.spent.wall),
        percent(attempt.spent.goodput),
    )


def _table(goodput: Goodput) -> Markup:
    heads = join(html('<th scope="col">{}</th>', head) for head in ("spent on", "time", "share"))
    rows = join(_rows(goodput.spent), between="\n")
    return html("<table><thead><tr>{}</tr></thead>\n<tbody>{}</tbody></table>", heads, rows)


def _rows(spent: TimeSpent) -> Iterator[Markup]:
    """Productive steps, then the losses, the largest first; losses of 0 are left out."""
    seconds = asdict(spent)
    ordered = ["productive", *sorted(seconds.keys() - {"productive"}, key=lambda name: (-seconds[name], name))]
    for name in ordered:
        if seconds[name] > 0:
            yield html(
                '<tr><th scope="row"><span class="key spent-{}"></span>{}</th><td>{}</td><td>{}</td></tr>',
                name,
                NAMES[name],
                duration(seconds[name]),
                percent(seconds[name] / spent.wall),
            )
