"""Statistics of a tokens directory by source, from its manifest: `python -m data_prep stats DIR [--html FILE]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from data_prep.tokenizer.long_words import NAMED_CHARACTERS
from foundation.html import document, html, join
from foundation.remote_directory import manifest_of

_BAR, _SHOWN = 30, 80
_WIDTH, _HEIGHT, _GAP = 560, 120, 2


@dataclass(frozen=True)
class SourceStats:
    """One source in one split; `lengths[k]`: number of documents with 2^k up to 2^(k + 1) - 1 tokens."""

    split: str
    source: str
    documents: int
    tokens: int
    bytes: int
    lengths: tuple[int, ...]

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token."""
        return self.bytes / max(1, self.tokens)


def read_stats(directory: str) -> tuple[list[SourceStats], dict[str, int], list[str]]:
    """Reads the sources of every split, skipped and dropped records by reason, and further lines.

    Args:
        directory: a tokens directory, or its URL.

    Raises:
        DataError: not a tokens directory.
    """
    details = manifest_of(directory, kind="tokens").details
    rows = [
        SourceStats(split, source, sums["documents"], sums["tokens"], sums["bytes"], tuple(sums["lengths"]))
        for split, entry in details["splits"].items()
        for source, sums in entry.get("sources", {}).items()
    ]
    lines = cluster_lines(details.get("clusters"), rows) + long_word_lines(details.get("long_words", []))
    lines += drop_lines(details.get("dropped_by_source", {}), rows)
    return rows, details["skipped"] | details.get("dropped", {}), lines


def cluster_lines(clusters: dict[str, Any] | None, rows: list[SourceStats]) -> list[str]:
    """Lines on the clusters of duplicates in a manifest: sizes, losses of each source, the largest clusters."""
    if not clusters or not clusters["sizes"]:
        return []
    sizes = (f"{n:,} of {1 << k:,} - {(2 << k) - 1:,}" for k, n in enumerate(clusters["sizes"]) if n)
    lines = [f"clusters of duplicates by documents: {', '.join(sizes)}"]
    for source, lost in clusters["sources"].items():
        dropped = sum(lost.values())
        whole = dropped + sum(row.documents for row in rows if row.source == source)
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in lost.items())
        lines.append(f"{source}: {dropped:,} of {whole:,} documents were duplicates ({reasons})")
    lines += [
        f"{of['documents']:,} documents; kept: {of['source']}: {of['file']} at {of['at']}" for of in clusters["largest"]
    ]
    return lines


def drop_lines(dropped: dict[str, dict[str, dict[str, Any]]], rows: list[SourceStats]) -> list[str]:
    """Lines on the documents that cleaning dropped, by source and filter, with examples.

    Args:
        dropped: `dropped_by_source` of a manifest.
        rows: documents that were kept.
    """
    lines: list[str] = []
    for source, reasons in dropped.items():
        lost = sum(entry["documents"] for entry in reasons.values())
        whole = lost + sum(row.documents for row in rows if row.source == source)
        lines.append(f"{source}: cleaning dropped {lost:,} of {whole:,} documents ({lost / whole:.1%})")
        for reason, entry in sorted(reasons.items(), key=lambda item: -item[1]["documents"]):
            lines.append(f"{entry['documents']:>14,}  {reason}")
            for file, at, text in entry["examples"]:
                lines.append(f"{'':16}{file} at {at}: {' '.join(text.split())[:_SHOWN]}")
    return lines


def long_word_lines(named: list[dict[str, Any]]) -> list[str]:
    """Lines on documents with very long words, from a manifest or `finish.name_long_words`."""
    if not named:
        return []
    lines = [f"documents with a word of {NAMED_CHARACTERS:,} characters or more (DNA, base64, runs of blanks):"]
    for entry in named:
        (unit,) = entry.keys() & {"line", "row", "record"}
        where = f"{entry['file']}:{entry[unit]}" if unit == "line" else f"{entry['file']}, {unit} {entry[unit]}"
        lines.append(f"{entry['characters']:>14,}  {entry['source']}: {where}")
    return lines


def print_stats(
    rows: list[SourceStats], dropped: dict[str, int], lines: list[str], *, console: Console | None = None
) -> None:
    """Prints the statistics as tables, then the lines that `read_stats` returned."""
    console = console or Console()
    table = Table(box=None, pad_edge=False)
    for name, side in (("split", "left"), ("source", "left")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for name in ("documents", "tokens", "share", "bytes/token", "tokens/document"):
        table.add_column(name, justify="right")
    totals = {row.split: sum(r.tokens for r in rows if r.split == row.split) for row in rows}
    for row in rows:
        share = f"{100 * row.tokens / max(1, totals[row.split]):.1f} %"
        mean = f"{row.tokens / max(1, row.documents):,.0f}"
        counts = (f"{row.documents:,}", f"{row.tokens:,}", share, f"{row.bytes_per_token:.3f}", mean)
        table.add_row(row.split, row.source, *counts)
    console.print(table)
    console.print("\ntokens per document, all sources:")
    lengths = _sum_lengths(rows)
    for k, count in enumerate(lengths):
        if count:
            bar = "█" * max(1, round(_BAR * count / max(lengths)))
            console.print(f"{1 << k:>12,} - {(2 << k) - 1:<12,} {count:>14,} {bar}", highlight=False)
    console.print("\nskipped or dropped:" if dropped else "\nnothing was skipped or dropped")
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        console.print(f"{count:>14,}  {reason}", highlight=False)
    for line in lines:
        console.print(line, highlight=False, markup=False)


def html_page(directory: Path, rows: list[SourceStats], dropped: dict[str, int], lines: list[str]) -> str:
    """The statistics as a self-contained HTML page."""
    body = [html("<h1>{}</h1>", directory), _html_table(rows)]
    for row in rows:
        title = f"{row.split}, {row.source}: documents by tokens"
        body.append(html("<h2>{}</h2>{}", title, _histogram(row.lengths, title)))
    body.append(html("<h2>Skipped or dropped</h2>{}", _reasons(dropped)))
    if lines:
        body.append(
            html("<h2>Duplicates, very long words, cleaning</h2>{}", join(html("<p>{}</p>", line) for line in lines))
        )
    return document(title=directory.name, style=_STYLE, body=join(body, between="\n"))


def _sum_lengths(rows: list[SourceStats]) -> list[int]:
    sums = [0] * max((len(row.lengths) for row in rows), default=0)
    for row in rows:
        for k, count in enumerate(row.lengths):
            sums[k] += count
    return sums


def _html_table(rows: list[SourceStats]) -> Markup:
    heads = join(html("<th>{}</th>", name) for name in ("split", "source", "documents", "tokens", "bytes per token"))
    cells = (
        (row.split, row.source, f"{row.documents:,}", f"{row.tokens:,}", f"{row.bytes_per_token:.3f}") for row in rows
    )
    lines = (html("<tr>{}</tr>", join(html("<td>{}</td>", cell) for cell in line)) for line in cells)
    return html("<table><tr>{}</tr>{}</table>", heads, join(lines))


def _histogram(lengths: tuple[int, ...], title: str) -> Markup:
    highest, step = max([*lengths, 1]), _WIDTH / max(1, len(lengths))
    bars: list[Markup] = []
    for k, count in enumerate(lengths):
        height = _HEIGHT * count / highest
        place = (k * step, _HEIGHT - height, step - _GAP, height)
        words = f"{1 << k:,} to {(2 << k) - 1:,} tokens: {count:,} documents"
        bar = '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
        label = html('<text x="{:.1f}" y="{}">{}</text>', k * step + step / 2, _HEIGHT + 14, _short(1 << k))
        bars.append(html(bar, *place, words) + label)
    svg = '<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{title}">{bars}</svg>'
    return html(svg, width=_WIDTH, height=_HEIGHT + 20, title=title, bars=join(bars))


def _reasons(dropped: dict[str, int]) -> Markup:
    if not dropped:
        return Markup("<p>Nothing.</p>")
    ordered = sorted(dropped.items(), key=lambda item: -item[1])
    rows = join(html("<tr><td>{}</td><td>{:,}</td></tr>", reason, count) for reason, count in ordered)
    return html("<table><tr><th>reason</th><th>documents</th></tr>{}</table>", rows)


def _short(tokens: int) -> str:
    return f"{tokens}" if tokens < 1024 else f"{tokens >> 10}K" if tokens < 1 << 20 else f"{tokens >> 20}M"


_STYLE = """:root { color-scheme: light dark; --bar: #2a6f97; }
@media (prefers-color-scheme: dark) { :root { --bar: #61a5c2; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem .2rem 0; text-align: right; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
th { border-bottom: 1px solid; font-weight: 600; } h2 { font-size: 1rem; margin-top: 2rem; }
svg { max-width: 100%; height: auto; } rect { fill: var(--bar); }
text { font-size: 10px; fill: currentColor; text-anchor: middle; }
"""
