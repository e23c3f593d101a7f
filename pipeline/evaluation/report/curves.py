"""Selects the charts of a set of runs, and writes their captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from foundation.task_figures import NAMES
from pipeline.evaluation.report.charts import Chart, ChartLine
from pipeline.evaluation.report.runs import MEMORY, RunRecord, StageBand
from pipeline.evaluation.report.series import POINTS, smoothing_window

COMPARABLE = 8.0
"""Runs whose lengths in tokens differ by a larger factor get separate charts: the shorter would be barely visible."""


SOURCE_CHARTS = 12
"""Number of sources with a chart of their own."""


@dataclass(frozen=True)
class CurveGroup:
    """Runs that share axes, each with its index in the report."""

    name: str
    runs: tuple[tuple[int, RunRecord], ...]

    @property
    def bands(self) -> list[StageBand]:
        """The stages that all runs of the group have at the same tokens, e.g. those of a base before its branches."""
        first, *others = [run.stages for _, run in self.runs]
        return [band for band in first if all(band in other for other in others)]


def groups(runs: Sequence[RunRecord]) -> list[CurveGroup]:
    """All runs on the same axes, or each on its own if the longest is over `COMPARABLE` times the shortest."""
    placed = tuple(enumerate(runs))
    lengths = [run.tokens for run in runs]
    if max(lengths) <= COMPARABLE * min(lengths):
        return [CurveGroup("all", placed)]
    return [CurveGroup(f"run{index}", ((index, run),)) for index, run in placed]


def loss_chart(group: CurveGroup) -> Chart:
    """Training and held-out loss."""
    lines = [_line(place, run.loss_key, marks=True, run=run) for place, run in group.runs]
    return Chart(f"{group.name}-loss", "Loss, nats per token", lines, cut=True, bands=group.bands)


def side_charts(group: CurveGroup) -> list[Chart]:
    """Learning rate, gradient norm, tokens/s, MFU, memory, KL from a teacher; held-out loss by source; tasks."""

    def chart(key: str, title: str, **how: Any) -> Chart:
        lines = [_line(place, key, run=run) for place, run in group.runs if run.has(key)]
        return Chart(f"{group.name}-{key}", title, lines, from_zero=True, bands=group.bands, **how)

    charts = [
        chart("lr", "Learning rate", show=_short, smoothed=False),
        chart("grad_norm", "Gradient norm, before clipping", cut=True),
        chart("tokens_per_second", "Training speed, tokens/s", show=_short),
        chart("mfu", "Model FLOPs utilization (MFU)"),
        _memory_chart(group),
        chart("kl", "KL to the teacher, nats per token", cut=True),
    ]
    return [*(one for one in charts if one.lines), *_source_charts(group), *_task_charts(group)]


def _memory_chart(group: CurveGroup) -> Chart:
    """Peak memory of the rank that needs most."""
    found = [(place, run, key) for place, run in group.runs for key in MEMORY if run.has(key)]
    lines = [ChartLine(place, run.name, run.series("tokens"), run.series(key) / 2**30) for place, run, key in found]
    return Chart(f"{group.name}-memory", "Peak memory of a rank, GiB", lines, from_zero=True, smoothed=False)


def _source_charts(group: CurveGroup) -> Iterator[Chart]:
    """Yields a chart of the held-out loss of each source, of the first `SOURCE_CHARTS`."""
    losses = [(place, run, run.source_losses()) for place, run in group.runs]
    names = list(dict.fromkeys(name for _, _, each in losses for name in each))
    for number, name in enumerate(names[:SOURCE_CHARTS]):
        lines = [ChartLine(place, run.name, *each[name]) for place, run, each in losses if name in each]
        yield Chart(f"{group.name}-source{number}", f"Held-out loss of {name}, nats per token", lines, smoothed=False)


def _task_charts(group: CurveGroup) -> Iterator[Chart]:
    """Yields a chart for each task on which a run was evaluated, of the task's first figure."""
    for number, task in enumerate(dict.fromkeys(name for _, run in group.runs for name in run.tasks)):
        rows = [row for _, run in group.runs for row in run.tasks.get(task, ())]
        name = next((name for name in NAMES if any(name in row for row in rows)), None)
        if name is not None:
            found = [(place, run, *run.task_figure(task, name)) for place, run in group.runs]
            lines = [ChartLine(place, run.name, at, values) for place, run, at, values in found if at.size]
            title = f"{task}: {name.replace('_', ' ')}"
            yield Chart(f"{group.name}-task{number}", title, lines, smoothed=False, bands=group.bands)


def remarks(group: CurveGroup, chart: Chart) -> Iterator[str]:
    """Sentences of the loss chart's caption: what lines and points show, and what was averaged or left out."""
    runs = [run for _, run in group.runs]
    if any(smoothing_window(run.steps) > 1 for run in runs):
        windows = _each(group, [f"{smoothing_window(run.steps):,}" for run in runs])
        yield f"Thin: training loss of each step. Thick: its centered mean over {windows} steps."
    else:
        yield "Line, or circle if there is only one step: training loss of each step."
    if any(run.evaluations for run in runs):
        yield "Points: held-out loss; the last value is written beside its line."
    if group.bands:
        yield f"Bands, from the left: {', '.join(f'stage {band.name}' for band in group.bands)}."
    longest = max(run.steps for run in runs)
    if longest > POINTS:
        yield f"Runs of more than {POINTS:,} steps are drawn as {POINTS:,} points, each the mean of neighboring steps."
    for run in runs:
        if run.loss_key != "loss":
            yield f"{run.name} is distilled: its cross-entropy with the data is shown, not the sum it minimizes."
    yield from cut_remark(chart)


def cut_remark(chart: Chart) -> Iterator[str]:
    """A sentence if the first values are outside of the chart."""
    cut = chart.cut_off()
    if cut is not None:
        yield f"The first steps, up to {cut:.2f}, are above the chart."


def _each(group: CurveGroup, texts: Sequence[str]) -> str:
    """One text if all texts are equal, else "9 (teacher), 5 (student)"."""
    if len(set(texts)) == 1:
        return texts[0]
    return ", ".join(f"{text} ({run.name})" for text, (_, run) in zip(texts, group.runs, strict=True))


def _line(place: int, key: str, *, run: RunRecord, marks: bool = False) -> ChartLine:
    held_out = {"marks": run.evaluated()} if marks else {}
    return ChartLine(place, run.name, run.series("tokens"), run.series(key), **held_out)


def _short(value: float) -> str:
    """A number on a narrow axis: 0.0005 as 5e-4, 25000 as 25k."""
    if abs(value) >= 10_000:
        return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k"
    if 0 < abs(value) < 0.01:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"
