"""Converts matplotlib's SVG output to inline SVG with the page's colors and fonts.

matplotlib needs fixed colors, and the page's colors follow the light or dark mode. So charts are drawn in one
placeholder color per role, which this module replaces by the CSS custom properties of page.css.
"""

from __future__ import annotations

import io
import re
import warnings
from contextlib import AbstractContextManager

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

from foundation.html import html

TEXT, GRID, GROUND = "#fe0001", "#fe0002", "#fe0003"
SERIES = tuple(f"#fe00a{i}" for i in range(6))
"""Placeholder colors of runs; from the seventh run on they repeat, with another dash."""

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (7, 2, 1.5, 2))
"""Dash patterns of the runs' lines, on and off in line widths: they tell runs apart without colors."""

_ROLES = {
    TEXT: "var(--muted)",
    GRID: "var(--rule)",
    GROUND: "var(--ground)",
    **{color: f"var(--series-{i})" for i, color in enumerate(SERIES, start=1)},
}
_SETTINGS = {
    "svg.hashsalt": "headrace",  # a fixed salt for ids: equal input gives equal bytes
    "svg.fonttype": "none",  # text stays text: selectable, and in the page's font
    "font.size": 12,
    "text.color": TEXT,
    "axes.edgecolor": GRID,
    "axes.labelcolor": TEXT,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "grid.color": GRID,
    "path.simplify": False,  # lines are averaged into fewer points before; simplification would change them
}


def color(index: int) -> str:
    """The placeholder color of run `index`."""
    return SERIES[index % len(SERIES)]


def dash(index: int) -> tuple[float, ...]:
    """The dash pattern of run `index`: different for the first runs, and for runs that share a color."""
    return DASHES[(index + index // len(SERIES)) % len(DASHES)]


def settings() -> AbstractContextManager[None]:
    """Context manager with the matplotlib settings of the report."""
    context: AbstractContextManager[None] = mpl.rc_context(_SETTINGS)
    return context


def inline(figure: Figure, *, name: str, label: str) -> Markup:
    """Writes a figure as an `<svg>` element.

    Args:
        figure: drawn within `settings()`, in placeholder colors.
        name: unique on the page, letters, digits and hyphens; prefixed to all ids, since clip paths are found by id in
            the whole page.
        label: description for screen readers.
    """
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # a name in a script that matplotlib's font lacks: the browser's font has it
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|defs)>\s*(<rdf:RDF.*?|<style.*?)</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    assert re.fullmatch(r"[\w-]+", name)
    text = re.sub(r"<[^>]*>", lambda tag: _on_page(tag[0], name), text)
    return _opening(text, label)


def _on_page(tag: str, name: str) -> str:
    """Rewrites a tag with its own ids and the page's colors; text between tags stays unchanged."""
    tag = re.sub(r'\bid="', f'id="{name}-', tag).replace("url(#", f"url(#{name}-")
    tag = re.sub(r'xlink:href="#', f'href="#{name}-', tag)
    for placeholder, role in _ROLES.items():
        tag = tag.replace(placeholder, role)
    return tag


def _opening(text: str, label: str) -> Markup:
    """Replaces the root element's attributes: no fixed size, and no namespaces, which HTML does not need."""
    box = re.search(r'viewBox="([^"]+)"', text)
    assert box is not None
    # matplotlib escapes the text that it writes
    rest = Markup(text[text.index(">") + 1 :].strip())
    return html('<svg viewBox="{}" role="img" aria-label="{}">{}', box[1], label, rest)
