"""The section on branches: the tree of the runs, and their held-out losses at equal numbers of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from foundation.html import NOTHING, html, join
from pipeline.evaluation.report.runs import RunRecord

_MOST_ROWS = 12
_NOTE = (
    "Held-out loss in nats per token, where two runs or more were evaluated after the same number of tokens, those of"
    " the base included; bold: the lowest. evaluation.every_tokens makes runs with different batches comparable."
)


def branches_section(runs: Sequence[RunRecord]) -> Markup:
    """Returns the section; empty where no run begins with another's checkpoint."""
    if not any(_start(run) for run in runs):
        return NOTHING
    return html("<section>\n<h2>Branches</h2>\n{}\n{}\n</section>", _tree(runs), _comparison(runs))


def _start(run: RunRecord) -> Mapping[str, Any] | None:
    """Returns run and step of the checkpoint with which a run begins; None for initial weights."""
    found: Mapping[str, Any] | None = run.manifest.details.get("branch")
    return found


def _home(place: str | Path) -> str:
    """Returns the absolute path of a run's directory, or its URL."""
    return str(place) if "://" in str(place) else str(Path(place).resolve())


def _tree(runs: Sequence[RunRecord]) -> Markup:
    """A nested list: every run below the one from which it branches, which need not be in the report."""
    names = {_home(run.path): run.name for run in runs}
    children: dict[str, list[RunRecord]] = {}
    for run in runs:
        if (start := _start(run)) is not None:
            children.setdefault(_home(start["run"]), []).append(run)
    branches = {_home(run.path) for each in children.values() for run in each}
    roots = [home for home in dict.fromkeys([*names, *children]) if home not in branches]
    return html("<ul>{}</ul>", join(_node(home, names.get(home, home), children) for home in roots))


def _node(home: str, text: str, children: Mapping[str, Sequence[RunRecord]]) -> Markup:
    own = [(run, _start(run) or {}) for run in children.get(home, ())]
    below = join(_node(_home(run.path), f"{run.name}, from step {start['step']:,}", children) for run, start in own)
    return html("<li>{}{}</li>", text, html("<ul>{}</ul>", below) if own else NOTHING)


def _comparison(runs: Sequence[RunRecord]) -> Markup:
    """A table with a row for each number of tokens after which several runs were evaluated."""
    found = [_losses(run) for run in runs]
    counts = sorted({count for losses in found for count in losses})
    equal = [count for count in counts if sum(count in losses for losses in found) > 1]
    if not equal:
        return html('<p class="note">{}</p>', "No two of the runs were evaluated after the same number of tokens.")
    shown = equal[-_MOST_ROWS:]
    heads = join(html('<th scope="col">{}</th>', head) for head in ("tokens", *(run.name for run in runs)))
    rows = join((_row(count, [losses.get(count) for losses in found]) for count in shown), between="\n")
    table = html("<table><thead><tr>{}</tr></thead>\n<tbody>{}</tbody></table>", heads, rows)
    note = _NOTE + (f" The last {_MOST_ROWS} of {len(equal):,}." if len(equal) > _MOST_ROWS else "")
    return html('<div class="scroll">{}</div>\n<p class="note">{}</p>', table, note)


def _losses(run: RunRecord) -> dict[int, float]:
    """Returns the tokens trained on before each held-out evaluation, with the loss; the last of several at one step."""
    return {round(float(tokens)): float(loss) for tokens, loss in zip(*run.evaluated(), strict=True)}


def _row(count: int, losses: Sequence[float | None]) -> Markup:
    lowest = min(loss for loss in losses if loss is not None)
    cells = join(html("<td>{}</td>", _cell(loss, best=loss == lowest)) for loss in losses)
    return html('<tr><th scope="row">{:,}</th>{}</tr>', count, cells)


def _cell(loss: float | None, *, best: bool) -> str | Markup:
    text = "" if loss is None else f"{loss:.4f}"
    return html("<b>{}</b>", text) if best else text
