"""Figures of the models: size against quality, and the sensitivity of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from foundation.directory import MANIFEST, read_manifest
from foundation.html import NOTHING, html, join
from pipeline.evaluation.comparison.rows import Row
from pipeline.evaluation.comparison.size_quality import Look, Picture, draw, pareto, picture_of
from pipeline.evaluation.report import svg

_PIXELS_PER_INCH = 72
_MOST_LAYERS = 60


def size_quality_figure(rows: Sequence[Row]) -> Markup:
    """The picture in a wide and a narrow drawing; nothing where fewer than two models were measured."""
    picture = picture_of(rows)
    if picture is None:
        return NOTHING
    wide = _drawn(picture, width=960, height=380, name="size")
    narrow = _drawn(picture, width=360, height=320, name="size-narrow")
    left_out = [row.name for row in rows if row.mean_kl == 0] if "KL" in picture.axis else []
    zero = f" {', '.join(dict.fromkeys(left_out))}, whose KL is 0, is not in it." if left_out else ""
    best = pareto(picture.points)
    frontier = "Dashed: the Pareto frontier, the models that no other one is both smaller and better than."
    note = (frontier if len(best) > 1 else f"{best[0].label} is smaller and better than all others in it.") + zero
    return html(
        '<figure>\n<h3>{}</h3>\n<div class="wide">{}</div><div class="narrow">{}</div>\n'
        "<figcaption>{}</figcaption></figure>",
        _title(picture),
        wide,
        narrow,
        note,
    )


def _title(picture: Picture) -> str:
    return f"{picture.axis[0].upper()}{picture.axis[1:]}, against weights on disk"


def _drawn(picture: Picture, *, width: int, height: int, name: str) -> Markup:
    with svg.settings():
        figure = Figure(figsize=(width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        room = 1.25 if width > 600 else 1.6  # labels need room
        draw(axes, picture, Look(svg.SERIES[0], svg.TEXT, svg.TEXT, svg.GROUND), room=room)
        axes.set_ylabel("")  # the label is above the figure
        axes.tick_params(length=0, which="both", pad=6)
        return svg.inline(figure, name=name, label=f"Size and quality: weights on disk against {picture.axis}")


def sensitivity_figures(rows: Sequence[Row]) -> Iterator[Markup]:
    """A bar chart for each model whose manifest has the KL that quantizing one layer alone causes."""
    seen = set()
    for row in rows:
        if row.path not in seen:
            seen.add(row.path)
            entries = _sensitivity(row)
            if entries:
                yield _bars(row.name, entries)


def _sensitivity(row: Row) -> list[dict[str, Any]]:
    if not (row.path / MANIFEST).is_file():
        return []
    recorded = read_manifest(row.path, kind="model").details.get("sensitivity") or []
    return [each for each in recorded if isinstance(each, dict) and isinstance(each.get("kl"), int | float)]


def _bars(name: str, entries: Sequence[dict[str, Any]]) -> Markup:
    """Horizontal bars, the most sensitive first; their length is proportional to the KL."""
    ordered = sorted(entries, key=lambda each: -each["kl"])
    shown, highest = ordered[:_MOST_LAYERS], max(ordered[0]["kl"], 1e-300)
    rows = (
        html(
            '<tr><th scope="row">{}</th><td>{}</td><td class="bar"><span style="width:{:.1f}%"></span></td>'
            "<td>{:.2e}</td><td>{}</td></tr>",
            each.get("layer", ""),
            each.get("scheme", ""),
            100 * max(each["kl"], 0) / highest,
            each["kl"],
            _megabytes(each.get("bytes")),
        )
        for each in shown
    )
    rest = f" {len(ordered) - len(shown)} less sensitive layers are left out." if len(ordered) > len(shown) else ""
    note = "KL to the original, in nats, with one layer alone in the scheme beside it, and the layer's bytes in it."
    heads = join(html('<th scope="col">{}</th>', head) for head in ("layer", "scheme", "", "KL", "MB"))
    return html(
        "<figure>\n<h3>Sensitivity of the layers of {name}</h3>\n"
        '<div class="scroll" tabindex="0" role="region" aria-label="Sensitivity of {name}">\n'
        '<table class="bars"><thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n'
        "<figcaption>{note}</figcaption></figure>",
        name=name,
        heads=heads,
        rows=join(rows, between="\n"),
        note=note + rest,
    )


def _megabytes(value: Any) -> str:
    return f"{value / 1e6:,.3f}" if isinstance(value, int | float) else "-"
