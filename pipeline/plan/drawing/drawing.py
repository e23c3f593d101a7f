"""Rows of bars over time as an SVG, and pages with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from foundation.html import document, html, join

_WIDTH, _LEFT, _ROW, _BAR, _TOP = 1200.0, 110.0, 30.0, 24.0, 26.0
_LETTER = 7.0
"""Width of a letter in pixels: a text that does not fit into its bar is left out."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar for something that takes time.

    Attributes:
        row: number of the row, from the top.
        start_s, end_s: seconds since the beginning.
        kind: key of the drawing's legend.
        text: text in the bar, where there is room.
        title: text shown under the pointer.
        opacity: opacity of the bar's color, up to 1.
    """

    row: int
    start_s: float
    end_s: float
    kind: str
    text: str
    title: str
    opacity: float = 1.0


@dataclass(frozen=True)
class Drawing:
    """Bars in rows.

    Attributes:
        label: description of the drawing, in a sentence.
        rows: labels of the rows.
        bars: bars of all rows.
        legend: kind of a bar -> color.
        note: text at the upper right.
        seconds: length of the time axis, in seconds.
    """

    label: str
    rows: Sequence[str]
    bars: Sequence[Bar]
    legend: Mapping[str, str]
    note: str
    seconds: float


def svg_of(drawing: Drawing) -> Markup:
    """Draws the SVG. Colors of text follow the page's (`currentColor`), so the drawing fits any HTML."""
    scale = (_WIDTH - _LEFT - 8) / drawing.seconds
    height = _TOP + _ROW * len(drawing.rows) + 24
    lines = [
        html(
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {:g} {:g}" role="img" aria-label="{}"'
            ' font-family="sans-serif" font-size="12" fill="currentColor">',
            _WIDTH,
            height,
            drawing.label,
        ),
        *_legend(drawing),
    ]
    for number, row in enumerate(drawing.rows):
        y = _TOP + number * _ROW
        lines.append(_text(0, y + 17, row))
        lines.append(
            html(
                '<rect x="{:g}" y="{:g}" width="{:.2f}" height="{:g}"\n  fill="currentColor" fill-opacity="0.08"/>',
                _LEFT,
                y,
                drawing.seconds * scale,
                _BAR,
            )
        )
    lines.extend(_bar(each, scale, drawing.legend[each.kind]) for each in drawing.bars)
    bottom = _TOP + len(drawing.rows) * _ROW + 14
    lines.append(_text(_LEFT, bottom, "0"))
    lines.append(_text(_WIDTH - 8, bottom, f"{drawing.seconds:.4g} s", anchor="end"))
    return html("{}\n</svg>", join(lines, between="\n"))


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> Markup:
    how = html(' text-anchor="{}"', anchor) if anchor != "start" else ""
    return html('<text x="{:g}" y="{:g}"{}>{}</text>', x, y, how, text)


def _legend(drawing: Drawing) -> Iterator[Markup]:
    x = _LEFT
    for kind, color in drawing.legend.items():
        yield html('<rect x="{:g}" y="4" width="12" height="12" fill="{}"/>', x, color)
        yield _text(x + 17, 14, kind)
        x += 34 + _LETTER * len(kind)
    yield _text(_WIDTH - 8, 14, drawing.note, anchor="end")


def _bar(each: Bar, scale: float, color: str) -> Markup:
    x, width, y = _LEFT + each.start_s * scale, (each.end_s - each.start_s) * scale, _TOP + each.row * _ROW
    inside = html('<text x="{:.2f}" y="{:g}" text-anchor="middle">{}</text>', x + width / 2, y + 16, each.text)
    return html(
        '<g><title>{}</title><rect x="{:.2f}" y="{:g}" width="{:.2f}" height="{:g}"'
        ' fill="{}" fill-opacity="{:.2f}" stroke="currentColor" stroke-width="0.4"/>{}</g>',
        each.title,
        x,
        y,
        width,
        _BAR,
        color,
        each.opacity,
        inside if width > _LETTER * len(each.text) + 2 else "",
    )


def page_of(title: str, parts: Sequence[tuple[str, Markup, Markup]]) -> str:
    """A self-contained HTML page.

    Args:
        title: title of the page.
        parts: sections, each a heading, an SVG and the HTML below it.
    """
    style = (
        ":root{color-scheme:light dark}body{font-family:sans-serif;max-width:1240px;margin:2em auto;padding:0 1em}"
        "svg{width:100%}td,th{padding:.2em 1em;text-align:right}"
    )
    body = join((html("<h2>{}</h2>\n{}\n{}", *part) for part in parts), between="\n")
    return document(title=title, style=style, body=body)
