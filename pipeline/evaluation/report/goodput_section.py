"""The section on goodput: what each run's wall clock was spent on, as a bar for each attempt and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape

from pipeline.evaluation.report.facts import duration
from pipeline.evaluation.report.runs import RunRecord
from pipeline.runtime.goodput.account import AttemptTime, Goodput, TimeSpent, read_goodput
from pipeline.runtime.goodput.text import NAMES, percent
from pipeline.runtime.launch.run_lock import is_training

_MOST_BARS = 40
_NOTE = (
    "A bar is an attempt with what it waited for before it; its length is its wall clock. Productive: steps that the"
    " final history has, without what is listed below it. Straggler time is estimated from the straggler reports."
)


def goodput_section(runs: Sequence[RunRecord]) -> str:
    """The section; empty where no run has a step."""
    found = [(run, goodput) for run in runs if (goodput := read_goodput(run.path, training=is_training(run.path)))]
    if not found:
        return ""
    figures = "\n".join(_figure(run.name, goodput) for run, goodput in found)
    return f'<section>\n<h2>Goodput</h2>\n{figures}\n<p class="note">{_NOTE}</p>\n</section>'


def _figure(name: str, goodput: Goodput) -> str:
    return (
        f"<figure>\n<h3>{escape(name)}: {percent(goodput.share)} of {duration(goodput.wall)}</h3>\n"
        f'<div class="scroll" tabindex="0" role="region" aria-label="Goodput of {escape(name)}">\n'
        f"{_bars(goodput)}\n{_table(goodput)}\n</div>\n</figure>"
    )


def _bars(goodput: Goodput) -> str:
    """A stacked bar for each attempt; of very many the newest."""
    shown = goodput.attempts[-_MOST_BARS:]
    longest = max(each.spent.wall for each in shown) or 1.0
    rows = "\n".join(_bar(each, longest) for each in shown)
    earlier = len(goodput.attempts) - len(shown)
    head = "attempt" + (f" ({earlier} earlier ones are in the table only)" if earlier else "")
    return (
        f'<table class="bars"><thead><tr><th scope="col">{head}</th><th scope="col"></th><th scope="col">wall clock'
        f'</th><th scope="col">goodput</th></tr></thead>\n<tbody>{rows}</tbody></table>'
    )


def _bar(attempt: AttemptTime, longest: float) -> str:
    parts = "".join(
        f'<span class="spent-{name}" style="width:{100 * seconds / longest:.2f}%"'
        f' title="{NAMES[name]}: {duration(seconds)}"></span>'
        for name, seconds in asdict(attempt.spent).items()
        if seconds > 0
    )
    return (
        f'<tr><th scope="row">{attempt.number}</th><td class="bar"><div class="stacked">{parts}</div></td>'
        f"<td>{duration(attempt.spent.wall)}</td><td>{percent(attempt.spent.goodput)}</td></tr>"
    )


def _table(goodput: Goodput) -> str:
    rows = "\n".join(_rows(goodput.spent))
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("spent on", "time", "share"))
    return f"<table><thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table>"


def _rows(spent: TimeSpent) -> Iterator[str]:
    """Productive steps, then the losses, the largest first; those that are 0 are left out."""
    seconds = asdict(spent)
    ordered = ["productive", *sorted(seconds.keys() - {"productive"}, key=lambda name: (-seconds[name], name))]
    for name in ordered:
        if seconds[name] > 0:
            yield (
                f'<tr><th scope="row"><span class="key spent-{name}"></span>{NAMES[name]}</th>'
                f"<td>{duration(seconds[name])}</td><td>{percent(seconds[name] / spent.wall)}</td></tr>"
            )
