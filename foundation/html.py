"""HTML pages in which every value is escaped: data prep, planner and report all write their pages with this module."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable

from markupsafe import Markup

NOTHING = Markup("")


def html(template: str, *values: object, **named: object) -> Markup:
    """Fills the `{}` of a literal template as `str.format` does.

    Args:
        template: HTML written in the program, never text from an input.
        values: values to insert, escaped (quotes included) unless they are `Markup`.
        named: values for `{name}`, escaped in the same way.
    """
    return Markup(template).format(*values, **named)


def join(parts: Iterable[Markup], *, between: str = "") -> Markup:
    """Joins pieces of HTML; `between` is also HTML."""
    return Markup(between).join(parts)


def document(*, title: str, style: str, body: Markup, script: str = "") -> str:
    """Returns a self-contained page on which the browser runs only `script`.

    The Content-Security-Policy names the script by its hash: a script or an event handler in the data would not run
    even if it were not escaped.

    Args:
        title: title that the browser shows; escaped.
        style: the style sheet, from the program.
        body: contents of the page.
        script: JavaScript from the program.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; " if script else ""
    policy = (
        f"default-src 'none'; {allowed}style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return html(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n{script}</body>\n</html>\n",
        policy=policy,
        title=title,
        style=Markup(style),
        body=body,
        script=html("<script>{}</script>\n", Markup(script)) if script else NOTHING,
    )
