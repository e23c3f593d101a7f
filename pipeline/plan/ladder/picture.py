"""Draws a ladder: held-out loss over tokens for each rung, the fitted law, and the prediction with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from foundation.directory import write_text
from pipeline.plan.ladder.plan import Ladder
from pipeline.plan.ladder.prediction import LEVEL, PredictionVerdict
from pipeline.plan.ladder.runs import Done

_WIDTH, _HEIGHT = 8.0, 5.0  # inches
_COLORS = ("#1f5fa8", "#b3541e", "#2f7d4f", "#7a4fa3", "#a33b53", "#5a636b")
_TARGET, _TEXT = "#1d2125", "#1d2125"


def save_picture(
    path: Path, ladder: Ladder, done: Sequence[Done], verdict: PredictionVerdict, *, measured: float | None
) -> None:
    """Writes an SVG file, atomically.

    Args:
        path: the file; its directory exists.
        done: finished runs that were fitted.
        verdict: the law, and the prediction if there is one.
        measured: the large run's held-out loss, where it was trained.
    """
    import matplotlib as mpl  # noqa: PLC0415  (takes a second)
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.hashsalt": "headrace", "svg.fonttype": "none", "font.size": 11}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        for index, rung in enumerate(ladder.rungs):
            runs = [each for each in done if each.run.rung.name == rung.name]
            _rung(axes, runs, verdict, color=_COLORS[index % len(_COLORS)], ladder=ladder)
        _large(axes, ladder, verdict, measured=measured)
        axes.set_xscale("log")
        axes.set_xlabel("training tokens")
        axes.set_ylabel("held-out loss, nats per token")
        axes.grid(axis="y", linewidth=0.75, alpha=0.5)
        axes.set_axisbelow(True)
        for spine in ("top", "right"):
            axes.spines[spine].set_visible(False)
        axes.legend(frameon=False, labelcolor=_TEXT)
        axes.set_title("Scaling ladder", loc="left")
        drawn = StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": "headrace"})
    write_text(path, drawn.getvalue())


def _rung(axes: Any, runs: Sequence[Done], verdict: PredictionVerdict, *, color: str, ladder: Ladder) -> None:
    if not runs:
        return
    parameters = runs[0].run.rung.counts.multiplied
    label = f"{runs[0].run.rung.name}, N = {parameters:,}"
    tokens, losses = [each.run.tokens for each in runs], [each.loss for each in runs]
    axes.plot(tokens, losses, color=color, linestyle="none", marker="o", markersize=7, label=label)
    _curve(axes, verdict, parameters, min(tokens), max(*tokens, ladder.large.tokens / 2), color=color)


def _curve(axes: Any, verdict: PredictionVerdict, parameters: int, first: float, last: float, *, color: str) -> None:
    if verdict.law is None:
        return
    at = np.geomspace(first, last, 60)
    axes.plot(at, verdict.law.predict(np.full_like(at, parameters), at)[0], color=color, linewidth=1.2, alpha=0.7)


def _large(axes: Any, ladder: Ladder, verdict: PredictionVerdict, *, measured: float | None) -> None:
    large, found = ladder.large, verdict.prediction
    if found is not None:
        _curve(axes, verdict, large.counts.multiplied, large.tokens / 4, large.tokens, color=_TARGET)
        ends = [[found.loss - found.low], [found.high - found.loss]]
        within = f"{LEVEL:.0%} interval {found.low:.3f} to {found.high:.3f}"
        label = f"large run, N = {large.counts.multiplied:,}: {found.loss:.3f}, {within}"
        axes.errorbar([large.tokens], [found.loss], yerr=ends, color=_TARGET, marker="D", capsize=5, label=label)
    if measured is not None:
        axes.plot(
            [large.tokens],
            [measured],
            color=_TARGET,
            linestyle="none",
            marker="x",
            markersize=10,
            markeredgewidth=2,
            label=f"large run, measured: {measured:.3f}",
        )
