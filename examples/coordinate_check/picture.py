"""The pictures of a coordinate check and of a learning-rate sweep, as SVG files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from examples.coordinate_check.check import Line
from examples.coordinate_check.coordinates import PLACES
from examples.coordinate_check.rates import Sweep
from foundation.directory import write_text

_COLORS = ("#1f5fa8", "#c2571a", "#3d8b4f", "#7d4fa3", "#5a636b")
_MARKERS = ("o", "s", "^", "D", "v")
_DASHES: dict[str, tuple[float, ...]] = {"standard": (4, 2), "completep": ()}
_TITLES = {"standard": "standard", "completep": "CompleteP"}


def save_coordinates(lines: Sequence[Line], path: Path) -> None:
    """Draws one panel per parametrization and dimension: change of activations over size, both logarithmic."""
    panels = list(dict.fromkeys((line.parametrization, line.dimension) for line in lines))

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for (name, dimension), each in zip(panels, axes, strict=True):
            for line in lines:
                if (line.parametrization, line.dimension) == (name, dimension):
                    place = PLACES.index(line.place)
                    each.plot(line.sizes, line.values, color=_COLORS[place], marker=_MARKERS[place], label=line.place)
                    _logarithmic(each, line.sizes)
            each.set_yscale("log")
            each.set_title(_TITLES[name], loc="left")
            each.set_xlabel(dimension)
        axes[0].set_ylabel("root mean square of the change")
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(PLACES), frameon=False
        )

    _save(path, draw, width=2.9 * len(panels), height=3.6)


def save_rates(sweeps: Sequence[Sweep], path: Path) -> None:
    """Draws the final loss over the learning rate: a color per size, dashed for the standard parametrization."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        sizes = list(dict.fromkeys(each.size for each in sweeps))
        for each in sweeps:
            points = [(r, v) for r, v in zip(each.rates, each.losses, strict=True) if math.isfinite(v)]
            color = _COLORS[sizes.index(each.size)]
            label = f"{_TITLES[each.parametrization]}, {each.size}"
            style: dict[str, Any] = {"color": color, "dashes": _DASHES[each.parametrization]}
            axes.plot([r for r, _ in points], [v for _, v in points], marker="o", markersize=4, label=label, **style)
            lowest = min(each.losses)
            axes.plot([each.best], [lowest], marker="o", markersize=10, fillstyle="none", color=color, linestyle="none")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(list(sweeps[0].rates)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
        axes.set_xlabel("peak learning rate")
        axes.set_ylabel("training loss, nats per token")
        axes.legend(frameon=False)

    _save(path, draw, width=7.0, height=4.2)


def _logarithmic(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _save(path: Path, draw: Callable[[Figure], None], *, width: float, height: float) -> None:
    settings = {
        "svg.hashsalt": "headrace",
        "svg.fonttype": "none",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.4,
        "lines.markersize": 4,
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        drawn = StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": "headrace"})
    write_text(path, "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n")
