"""Rows of bars over time as an SVG, and pages with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LEFT, _ROW, _BAR, _TOP = 1200.0, 110.0, 30.0, 24.0, 26.0
_LETTER = 7.0
"""Width of a letter in pixels: a text that does not fit into its bar is left out."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that takes time.

    Attributes:
        row: from the top.
        start_s, end_s: seconds since the beginning.
        kind: key of the drawing's legend.
        text: in the bar, where there is room.
        title: shown under the pointer.
        opacity: of its color.
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
        label: what is shown, in a sentence.
        rows: labels.
        bars: of all rows.
        legend: kind -> color.
        note: at the upper right.
        seconds: of the whole.
    """

    label: str
    rows: Sequence[str]
    bars: Sequence[Bar]
    legend: Mapping[str, str]
    note: str
    seconds: float


def svg_of(drawing: Drawing) -> str:
    """The SVG. Colors of text follow the page's (`currentColor`), so that it can be put into any HTML."""
    scale = (_WIDTH - _LEFT - 8) / drawing.seconds
    height = _TOP + _ROW * len(drawing.rows) + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" role="img"'
        f' aria-label="{escape(drawing.label)}" font-family="sans-serif" font-size="12" fill="currentColor">',
        *_legend(drawing),
    ]
    for number, row in enumerate(drawing.rows):
        y = _TOP + number * _ROW
        lines.append(f'<text x="0" y="{y + 17:g}">{escape(row)}</text>')
        lines.append(f'<rect x="{_LEFT:g}" y="{y:g}" width="{drawing.seconds * scale:.2f}" height="{_BAR:g}"')
        lines.append('  fill="currentColor" fill-opacity="0.08"/>')
    lines.extend(_bar(each, scale, drawing.legend[each.kind]) for each in drawing.bars)
    bottom = _TOP + len(drawing.rows) * _ROW + 14
    lines.append(f'<text x="{_LEFT:g}" y="{bottom:g}">0</text>')
    lines.append(f'<text x="{_WIDTH - 8:g}" y="{bottom:g}" text-anchor="end">{drawing.seconds:.4g} s</text>')
    return "\n".join([*lines, "</svg>"])


def _legend(drawing: Drawing) -> Iterator[str]:
    x = _LEFT
    for kind, color in drawing.legend.items():
        yield f'<rect x="{x:g}" y="4" width="12" height="12" fill="{color}"/>'
        yield f'<text x="{x + 17:g}" y="14">{escape(kind)}</text>'
        x += 34 + _LETTER * len(kind)
    yield f'<text x="{_WIDTH - 8:g}" y="14" text-anchor="end">{escape(drawing.note)}</text>'


def _bar(each: Bar, scale: float, color: str) -> str:
    x, width, y = _LEFT + each.start_s * scale, (each.end_s - each.start_s) * scale, _TOP + each.row * _ROW
    bar = (
        f'<g><title>{escape(each.title)}</title><rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_BAR:g}"'
        f' fill="{color}" fill-opacity="{each.opacity:.2f}" stroke="currentColor" stroke-width="0.4"/>'
    )
    if width > _LETTER * len(each.text) + 2:
        bar += f'<text x="{x + width / 2:.2f}" y="{y + 16:g}" text-anchor="middle">{escape(each.text)}</text>'
    return bar + "</g>"


def page_of(title: str, parts: Sequence[tuple[str, str, str]]) -> str:
    """A page that needs nothing from elsewhere.

    Args:
        title: of the page.
        parts: heading, SVG, and HTML below it.
    """
    style = (
        ":root{color-scheme:light dark}body{font-family:sans-serif;max-width:1240px;margin:2em auto;padding:0 1em}"
        "svg{width:100%}td,th{padding:.2em 1em;text-align:right}"
    )
    body = "\n".join(f"<h2>{escape(heading)}</h2>\n{svg}\n{below}" for heading, svg, below in parts)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
