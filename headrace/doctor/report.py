"""What `headrace doctor` found: lines on the terminal, JSON lines as they come, and a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from markupsafe import Markup

from foundation.directory import write_text
from foundation.html import document, html, join
from headrace.doctor.check import Check, Finding

LINES, PAGE = "doctor.jsonl", "doctor.html"
_MARKS = {True: "ok", False: "FAIL", None: "-"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
td { vertical-align: top; padding: .2rem .8rem .2rem 0; } td:first-child { font-weight: 600; } .FAIL { color: #c33; }
"""


@dataclass
class DoctorReport:
    """The findings so far.

    Args:
        lines: open file of the JSON lines.
        as_json: whether the JSON lines go to the terminal, in place of text.
        finished: whether all checks were made.
    """

    lines: TextIO
    as_json: bool = False
    finished: bool = False
    _found: list[tuple[Check, Finding]] = field(default_factory=list)

    def begin(self, check: Check, number: str) -> None:
        """Prints which check begins; `number` is its place, such as 2/14."""
        if not self.as_json:
            print(f"[{number}] {check.name}: {check.text}", flush=True)

    def add(self, check: Check, finding: Finding) -> None:
        """Writes and prints a finding; a success that another node has had in the same words is only written."""
        line = json.dumps({"check": check.name, **asdict(finding)})
        print(line, file=self.lines, flush=True)
        known = finding.passed is not False and any(finding.text == each.text for each in self.findings(check))
        self._found.append((check, finding))
        if self.as_json or not known:
            print(line if self.as_json else "\n".join(_text(finding)), flush=True)

    def findings(self, check: Check) -> list[Finding]:
        """Returns the findings of a check so far."""
        return [finding for other, finding in self._found if other == check]

    def failed(self, check: Check) -> bool:
        """Whether a check has failed."""
        return any(finding.passed is False for finding in self.findings(check))

    @property
    def verdict(self) -> str:
        """Whether a training may start, in one sentence."""
        passed, failed, unknown = (
            sum(finding.passed is each for _, finding in self._found) for each in (True, False, None)
        )
        may = "a training may start" if self.finished and not failed else "no training should start yet"
        may += "" if self.finished else " (doctor did not end)"
        return f"{may}: {passed} findings passed, {failed} failed, {unknown} could not be checked here"

    def write_page(self, path: Path, *, title: str) -> None:
        """Writes the page."""
        rows = join(_row(check, finding) for check, finding in self._found)
        body = html("<h1>{}</h1>\n<p>{}</p>\n<table>\n{}</table>", title, self.verdict, rows)
        write_text(path, document(title=title, style=_STYLE, body=body))


def _text(finding: Finding) -> Iterator[str]:
    where = f"{finding.where}: " if finding.where and finding.passed is False else ""
    yield f"  {_MARKS[finding.passed]:5}{where}{finding.text}{_figures(finding)}"
    yield from (f"       {label}: {text}" for label, text in _advice(finding))


def _advice(finding: Finding) -> list[tuple[str, str]]:
    both = (("what it means", finding.meaning), ("what to do", finding.remedy))
    return [(label, text) for label, text in both if text]


def _figures(finding: Finding) -> str:
    values = {name: f"{value:,.4g}" if isinstance(value, float) else value for name, value in finding.figures.items()}
    return f" ({', '.join(f'{name} {value}' for name, value in values.items())})" if values else ""


def _row(check: Check, finding: Finding) -> Markup:
    advice = join(html("<br><b>{}:</b> {}", label, text) for label, text in _advice(finding))
    cells = (check.name, _MARKS[finding.passed], finding.where, html("{}{}{}", finding.text, _figures(finding), advice))
    return html('<tr class="{}">{}</tr>\n', _MARKS[finding.passed], join(html("<td>{}</td>", each) for each in cells))
