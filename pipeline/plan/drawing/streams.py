"""Computation and communication of one micro-batch of a run without a pipeline, as a drawing and as a Chrome trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from foundation.html import html
from pipeline.plan.drawing.drawing import Bar, Drawing, page_of, svg_of
from pipeline.plan.predict.overlap import Overlap, StreamEvent, overlapped
from pipeline.plan.predict.rank_time import RankTime
from pipeline.plan.predict.simulated_step import layer_costs, units_of
from pipeline.plan.predict.step_model import DataParallel

_KINDS = {
    "forward": ("forward", "#4c78a8"),
    "backward": ("backward", "#e4a43c"),
    "gather": ("all-gather of weights", "#6aa86a"),
    "reduce": ("reduction of gradients", "#b0719d"),
}
_STREAMS = ("communication", "computation")


@dataclass(frozen=True)
class Streams:
    """The two streams of a rank over a micro-batch.

    Attributes:
        names: names of the units whose weights are gathered together: embedding, layers, head.
        overlap: events of both streams.
    """

    names: Sequence[str]
    overlap: Overlap

    def text(self, event: StreamEvent) -> str:
        """An event in words, e.g. "all-gather of weights, layer 3"."""
        return f"{_KINDS[event.kind][0]}, {self.names[event.layer]}"

    @property
    def summary(self) -> str:
        """Seconds of the micro-batch and of its exposed communication, in words."""
        of = self.overlap
        return f"{of.seconds:.4g} s, exposed communication {of.exposed_s:.4g} of {of.communication_s:.4g} s"


def streams_of(how: DataParallel, rank: RankTime, *, micro_batches: int, engine: str) -> Streams:
    """Simulates a micro-batch with gathers and reductions: the only one of a step, or one of several equal ones.

    Where weights are gathered or gradients reduced once in a step, the micro-batch stands for the first forward and the
    last backward pass. Weights that an engine gathers after the update are left out.
    """
    units = units_of(rank)
    beside = how.reduce_share > 0
    visits = micro_batches if how.every_pass else 1
    gathers = 0.0 if not how.every_pass and engine == "deepspeed" else rank.weights / visits
    costs = layer_costs(units, gather_s=gathers, reduce_s=rank.gradients / how.reductions, regather=how.every_pass)
    return Streams([unit.name for unit in units], overlapped(costs, regather=how.every_pass, beside=beside))


def svg(streams: Streams) -> Markup:
    """Draws the two streams as rows from left to right."""
    used = {event.kind for event in streams.overlap.events}
    return svg_of(
        Drawing(
            label=f"Streams of a micro-batch: {streams.summary}",
            rows=_STREAMS,
            bars=[_bar(streams, event) for event in streams.overlap.events],
            legend={name: color for kind, (name, color) in _KINDS.items() if kind in used},
            note=streams.summary,
            seconds=streams.overlap.seconds,
        )
    )


def _bar(streams: Streams, event: StreamEvent) -> Bar:
    title = f"{streams.text(event)}: {event.start_s:.4g} to {event.end_s:.4g} s"
    number = streams.names[event.layer].removeprefix("layer ")
    return Bar(int(event.computes), event.start_s, event.end_s, _KINDS[event.kind][0], number, title)


def html_page(title: str, streams: Streams) -> str:
    """A self-contained page with the drawing."""
    note = "One micro-batch of rank 0, computation beside data-parallel communication, layer by layer."
    return page_of("Streams of a step", [(f"{title}: {streams.summary}", svg(streams), html("<p>{}</p>", note))])


def chrome_trace(streams: Streams) -> dict[str, Any]:
    """The Trace Event Format of chrome://tracing and Perfetto: one thread per stream, times in microseconds."""
    named = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
        for number, stream in enumerate(_STREAMS)
    ]
    events = [
        {
            "ph": "X",
            "name": streams.text(event),
            "cat": event.kind,
            "pid": 0,
            "tid": int(event.computes),
            "ts": event.start_s * 1e6,
            "dur": (event.end_s - event.start_s) * 1e6,
        }
        for event in streams.overlap.events
    ]
    return {"traceEvents": [*named, *events], "displayTimeUnit": "ms"}
