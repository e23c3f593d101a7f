"""A simulated step of a pipeline as a drawing (SVG, or an HTML page with it) and as a Chrome trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from foundation.html import html, join
from pipeline.plan.drawing.drawing import Bar, Drawing, page_of, svg_of
from pipeline.plan.predict.passes import PassKind
from pipeline.plan.predict.pipeline_simulation import TimedPass, Timeline

_COLORS = {
    PassKind.FORWARD: "#4c78a8",
    PassKind.BACKWARD: "#e4a43c",
    PassKind.INPUT_BACKWARD: "#e4a43c",
    PassKind.WEIGHT_BACKWARD: "#6aa86a",
}
_NAMES = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.INPUT_BACKWARD: "backward of the inputs",
    PassKind.WEIGHT_BACKWARD: "backward of the weights",
}


def svg(timeline: Timeline) -> Markup:
    """Draws a row per rank: bars have the number of their micro-batch, and later virtual stages are paler.

    Colors of text follow the page's (`currentColor`), so the drawing fits any HTML.
    """
    kinds = sorted({each.instruction.kind for each in timeline.passes}, key=list(_NAMES).index)
    bubble = f"bubble {timeline.bubble:.1%}"
    return svg_of(
        Drawing(
            label=f"Timeline of a step: {timeline.ranks} ranks, {timeline.seconds:.4g} s, {bubble}",
            rows=[f"rank {rank}" for rank in range(timeline.ranks)],
            bars=[_bar(each, timeline.ranks) for each in timeline.passes],
            legend={_NAMES[kind]: _COLORS[kind] for kind in kinds},
            note=bubble,
            seconds=timeline.seconds,
        )
    )


def _bar(each: TimedPass, ranks: int) -> Bar:
    of = each.instruction
    kind, number = _NAMES[of.kind], str(of.micro_batch)
    title = f"{kind}, micro-batch {number}, stage {of.stage}: {each.start_s:.4g} to {each.end_s:.4g} s"
    return Bar(each.rank, each.start_s, each.end_s, kind, number, title, opacity=1 / (1 + 0.45 * (of.stage // ranks)))


def html_page(timelines: Mapping[str, Timeline]) -> str:
    """A self-contained page with a drawing and the figures of each timeline.

    Args:
        timelines: title -> timeline.
    """
    parts = []
    for title, timeline in timelines.items():
        rows = join(
            html(
                "<tr><td>{}</td><td>{:.4g}</td><td>{}</td></tr>",
                rank,
                timeline.idle_s(rank),
                timeline.peak_in_flight(rank),
            )
            for rank in range(timeline.ranks)
        )
        head = Markup("<tr><th>rank</th><th>idle, s</th><th>micro-batches in flight, most</th></tr>")
        heading = f"{title}: {timeline.seconds:.4g} s, bubble {timeline.bubble:.1%}"
        parts.append((heading, svg(timeline), html("<table>{}{}</table>", head, rows)))
    return page_of("Pipeline schedules", parts)


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
