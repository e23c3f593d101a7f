"""What `headrace doctor` found: lines on the terminal, JSON lines as they come, and a page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from markupsafe import Markup

from foundation.directory import write_text
from foundation.html import NOTHING, document, html, join
from headrace.doctor.check import Check, Finding

LINES, PAGE = "doctor.jsonl", "doctor.html"
_MARKS = {True: "ok", False: "FAIL", None: "-"}
_COLOURS = {True: "#2a7", False: "#c33", None: "#888"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
td { vertical-align: top; padding: .2rem .8rem .2rem 0; } td:first-child { font-weight: 600; } small { opacity: .7; }
"""


@dataclass
class DoctorReport:
    """The findings so far.

    Args:
        lines: open file of the JSON lines.
        as_json: whether the JSON lines go to the terminal, in place of text.
    """

    lines: TextIO
    as_json: bool = False
    _found: list[tuple[Check, Finding]] = field(default_factory=list)

    def begin(self, check: Check, *, number: int, total: int) -> None:
        """Prints which check begins."""
        if not self.as_json:
            print(f"[{number}/{total}] {check.name}: {check.text}", flush=True)

    def add(self, check: Check, finding: Finding) -> None:
        """Writes and prints a finding; a success that another node has had in the same words is only written."""
        line = json.dumps({"check": check.name, **asdict(finding)})
        self.lines.write(f"{line}\n")
        self.lines.flush()
        known = finding.passed is not False and any(finding.text == each.text for _, each in self._found)
        self._found.append((check, finding))
        if self.as_json:
            print(line, flush=True)
        elif not known:
            print("\n".join(_text(finding)), flush=True)

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
        may = "a training may start" if not failed else "no training should start yet"
        return f"{may}: {passed} findings passed, {failed} failed, {unknown} could not be checked here"

    def write_page(self, path: Path, *, title: str) -> None:
        """Writes the page."""
        body = html("<h1>{}</h1>\n<p>{}</p>\n<table>\n{}</table>", title, self.verdict, self._rows())
        write_text(path, document(title=title, style=_STYLE, body=body))

    def _rows(self) -> Markup:
        return join(_row(check, finding) for check, finding in self._found)


def _text(finding: Finding) -> Iterable[str]:
    figures = ", ".join(f"{name} {_shown(value)}" for name, value in finding.figures.items())
    where = f"{finding.where}: " if finding.where and finding.passed is False else ""
    yield f"  {_MARKS[finding.passed]:5}{where}{finding.text}" + (f" ({figures})" if figures else "")
    for label, text in (("means", finding.meaning), ("try", finding.remedy)):
        if text:
            yield f"       {label}: {text}"


def _shown(value: float | int | str) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _row(check: Check, finding: Finding) -> Markup:
    figures = [html("<br><small>{}: {}</small>", name, _shown(value)) for name, value in finding.figures.items()]
    texts = (("What it means", finding.meaning), ("What to do", finding.remedy))
    advice = [html("<br><b>{}:</b> {}", label, text) for label, text in texts if text]
    return html(
        '<tr><td>{}</td><td style="color: {}">{}</td><td>{}</td><td>{}{}{}</td></tr>\n',
        check.name,
        Markup(_COLOURS[finding.passed]),
        _MARKS[finding.passed],
        finding.where,
        finding.text,
        join(advice) if advice else NOTHING,
        join(figures),
    )
