"""Pages made from names that are HTML: the text stays text, and no script of theirs could run."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

HOSTILE = "\"'><script>alert(1)</script><svg/onload=alert(1) id=\" x=' onclick=alert(1) url(#fe0001"


class Elements(HTMLParser):
    """Collects what a browser would make of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers: list[str] = []
        self.ids: list[str] = []
        self.policy = ""
        self.scripts: list[str] = []
        self._kind: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.handlers += [f"{tag} {name}" for name in given if name.startswith("on")]
        self.ids += [given["id"] or ""] if "id" in given else []
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        self._kind = (given.get("type") or "text/javascript") if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._kind == "text/javascript":
            self.scripts.append(data)
        self._kind = None


def assert_inert(page: str, *, scripts: int = 0) -> None:
    """Fails if `HOSTILE` is not on the page, if it made an element or an attribute, or if its script could run.

    Args:
        page: the HTML.
        scripts: how many scripts of the program's own the page has.
    """
    found = Elements()
    found.feed(page)
    assert "&lt;script&gt;alert(1)" in page
    assert found.handlers == []
    assert len(set(found.ids)) == len(found.ids)
    assert [one for one in found.ids if not re.fullmatch(r"[\w.-]+", one)] == []
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in found.scripts]
    assert len(hashes) == scripts
    policy = found.policy.split("; ")
    assert policy[0] == "default-src 'none'"
    assert [part for part in policy if "script" in part] == [f"script-src 'sha256-{each}'" for each in hashes]
