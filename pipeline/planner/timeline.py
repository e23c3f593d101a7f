"""A simulated step of a pipeline as a drawing (SVG, or an HTML page with it) and as a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from pipeline.planner.passes import Kind
from pipeline.planner.pipeline_simulation import TimedPass, Timeline

_COLORS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#e4a43c",
    Kind.INPUT_BACKWARD: "#e4a43c",
    Kind.WEIGHT_BACKWARD: "#6aa86a",
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_BACKWARD: "backward of the inputs",
    Kind.WEIGHT_BACKWARD: "backward of the weights",
}
_WIDTH, _LEFT, _ROW, _BAR, _TOP = 1200.0, 64.0, 30.0, 24.0, 26.0
_LETTER = 7.0
"""Width of a digit in pixels: a number that does not fit into its bar is left out."""


def svg(timeline: Timeline) -> str:
    """One row per rank from left to right, bars with the number of their micro-batch; later virtual stages are paler.

    Colors of text follow the page's (`currentColor`), so that it can be put into any HTML.
    """
    scale = (_WIDTH - _LEFT - 8) / timeline.seconds
    height = _TOP + _ROW * timeline.ranks + 24
    label = f"Timeline of a step: {timeline.ranks} ranks, {timeline.seconds:.4g} s, bubble {timeline.bubble:.1%}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" role="img"'
        f' aria-label="{escape(label)}" font-family="sans-serif" font-size="12" fill="currentColor">',
        *_legend(timeline),
    ]
    for rank in range(timeline.ranks):
        y = _TOP + rank * _ROW
        lines.append(f'<text x="0" y="{y + 17:g}">rank {rank}</text>')
        lines.append(f'<rect x="{_LEFT:g}" y="{y:g}" width="{timeline.seconds * scale:.2f}" height="{_BAR:g}"')
        lines.append('  fill="currentColor" fill-opacity="0.08"/>')
    lines.extend(_bar(each, scale, timeline.ranks) for each in timeline.passes)
    bottom = _TOP + timeline.ranks * _ROW + 14
    lines.append(f'<text x="{_LEFT:g}" y="{bottom:g}">0</text>')
    lines.append(f'<text x="{_WIDTH - 8:g}" y="{bottom:g}" text-anchor="end">{timeline.seconds:.4g} s</text>')
    return "\n".join([*lines, "</svg>"])


def _legend(timeline: Timeline) -> Iterator[str]:
    kinds = sorted({each.instruction.kind for each in timeline.passes}, key=list(_NAMES).index)
    x = _LEFT
    for kind in kinds:
        yield f'<rect x="{x:g}" y="4" width="12" height="12" fill="{_COLORS[kind]}"/>'
        yield f'<text x="{x + 17:g}" y="14">{_NAMES[kind]}</text>'
        x += 34 + _LETTER * len(_NAMES[kind])
    yield f'<text x="{_WIDTH - 8:g}" y="14" text-anchor="end">bubble {timeline.bubble:.1%}</text>'


def _bar(each: TimedPass, scale: float, ranks: int) -> str:
    x, width = _LEFT + each.start_s * scale, (each.end_s - each.start_s) * scale
    y, of = _TOP + each.rank * _ROW, each.instruction
    opacity = 1 / (1 + 0.45 * (of.stage // ranks))
    number = str(of.micro_batch)
    title = f"{_NAMES[of.kind]}, micro-batch {number}, stage {of.stage}: {each.start_s:.4g} to {each.end_s:.4g} s"
    bar = (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_BAR:g}"'
        f' fill="{_COLORS[of.kind]}" fill-opacity="{opacity:.2f}" stroke="currentColor" stroke-width="0.4"/>'
    )
    if width > _LETTER * len(number) + 2:
        bar += f'<text x="{x + width / 2:.2f}" y="{y + 16:g}" text-anchor="middle">{number}</text>'
    return bar + "</g>"


def html_page(timelines: Mapping[str, Timeline]) -> str:
    """A self-contained page with a drawing and the figures of each timeline.

    Args:
        timelines: title -> timeline.
    """
    parts = []
    for title, timeline in timelines.items():
        rows = "".join(
            f"<tr><td>{rank}</td><td>{timeline.idle_s(rank):.4g}</td><td>{timeline.peak_in_flight(rank)}</td></tr>"
            for rank in range(timeline.ranks)
        )
        head = "<tr><th>rank</th><th>idle, s</th><th>micro-batches in flight, most</th></tr>"
        parts.append(
            f"<h2>{escape(title)}: {timeline.seconds:.4g} s, bubble {timeline.bubble:.1%}</h2>\n"
            f"{svg(timeline)}\n<table>{head}{rows}</table>"
        )
    style = (
        ":root{color-scheme:light dark}body{font-family:sans-serif;max-width:1240px;margin:2em auto;padding:0 1em}"
        "svg{width:100%}td,th{padding:.2em 1em;text-align:right}"
    )
    head = f'<meta charset="utf-8"><title>Pipeline schedules</title><style>{style}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The Trace Event Format of chrome://tracing and Perfetto: one process per rank, times in microseconds."""
    named = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(timeline.ranks)
    ]
    events = [
        {
            "ph": "X",
            "name": f"{each.instruction.kind}{each.instruction.micro_batch}",
            "cat": _NAMES[each.instruction.kind],
            "pid": each.rank,
            "tid": each.instruction.stage,
            "ts": each.start_s * 1e6,
            "dur": (each.end_s - each.start_s) * 1e6,
            "args": {"stage": each.instruction.stage, "micro_batch": each.instruction.micro_batch},
        }
        for each in timeline.passes
    ]
    return {"traceEvents": [*named, *events], "displayTimeUnit": "ms"}
