"""Summary of the sweep's layouts: every column's families against the goals, and what is not equal, by reason."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from tests.sweeps.families import GOALS, is_decoder
from tests.sweeps.run_layouts import COLUMNS
from tests.sweeps.sweep import CellResult, wrapped

SUFFIX = " layouts"
"""End of the name of a cell whose note has the outcomes of its columns."""
_ORDER = ("equal", "refused", "differs", "failed")
_WHAT = (
    "Families that a layout trains as one process does, of those that train at all. cp is ring or Ulysses. Goals are in"
    " percent; the last columns are encoders and encoder-decoders with a causal head."
)


def note_of(outcomes: Mapping[str, str]) -> str:
    """One line of `COLUMN: OUTCOME`, which `summary` reads."""
    return " | ".join(f"{column}: {outcome.replace('|', '/')}" for column, outcome in outcomes.items())


def summary(results: Mapping[str, CellResult]) -> list[str]:
    """Lines of the page: counts per column, then what refused or failed, by reason."""
    families = dict(_outcomes(results))
    decoders = {kind: found for kind, found in families.items() if is_decoder(kind)}
    with_experts = {kind: found for kind, found in decoders.items() if "ep" in found}
    others = {kind: found for kind, found in families.items() if kind not in decoders}
    sizes = ["decoders", "equal", "%", "goal", "with experts", "equal", "%", "goal", "others", "equal", "%"]
    lines = ["## Layouts", "", wrapped(_WHAT), "", f"| column | {' | '.join(sizes)} |", "|---" + "|---:" * 11 + "|"]
    for column in [*COLUMNS, "cp", "export"]:
        goals = [str(goal or "") for goal in GOALS.get(column, (0, 0))]
        counts = [_counts(each, column) for each in (decoders, with_experts, others)]
        row = [*counts[0], goals[0], *counts[1], goals[1], *counts[2]]
        lines.append(f"| {column} | {' | '.join(row)} |")
    return [*lines, "", "### Not equal", "", *_reasons(families)]


def _reasons(families: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each reason and the columns that it rules out, with the number of families."""
    found = defaultdict(list)
    for kind, outcomes in families.items():
        columns = defaultdict(list)
        for column, outcome in outcomes.items():
            if column != "cp" and not outcome.startswith("equal"):
                columns[_reason(kind, outcome)].append(column)
        for why, some in columns.items():
            found[why, ", ".join(some)].append(kind)
    listed = sorted(found.items(), key=lambda item: -len(item[1]))
    return [wrapped(f"- {len(kinds)}: {columns}: {why}: {', '.join(kinds)}") for (why, columns), kinds in listed]


def _outcomes(results: Mapping[str, CellResult]) -> list[tuple[str, dict[str, str]]]:
    """Outcomes by column of the families that train."""
    every = []
    for cell, result in results.items():
        kind = cell.removesuffix(SUFFIX)
        found = dict(part.split(": ", 1) for part in result.note.split(" | ")) if cell != kind else {}
        if found.get("dp", "refused").startswith("refused"):
            continue
        if {"cp ring", "Ulysses"} <= found.keys():
            found["cp"] = min(
                found["cp ring"], found["Ulysses"], key=lambda each: _ORDER.index(re.split("[,:]", each)[0])
            )
        if kind in results:
            found["export"] = "equal" if results[kind].passed else results[kind].note
        every.append((kind, found))
    return every


def _counts(families: Mapping[str, Mapping[str, str]], column: str) -> list[str]:
    found = [each[column] for each in families.values() if column in each]
    equal = sum(each.startswith("equal") for each in found)
    return [str(len(found)), str(equal), f"{100 * equal / len(found):.1f}" if found else ""]


def _reason(kind: str, outcome: str) -> str:
    """An outcome; a refusal without key and remedy, the family's name and numbers, which differ between families."""
    if not outcome.startswith("refused"):
        return outcome
    text = re.sub(r"^refused: [\w.]+: ", "", outcome.partition(" (try: ")[0]).replace(kind, "FAMILY")
    return re.sub(r"(?<!\w)\d[\d.e-]*(?!\w)", "N", text)
