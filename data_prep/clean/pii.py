"""PII masking: replaces email addresses and public IP addresses.

Replacements are constant; datatrove takes them from a list in turn, and its output depends on earlier texts. The
patterns are tried only near an @, dots or colons: trying them everywhere takes ten times as long.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from data_prep.clean.document import Document
from data_prep.config.cleaning import PIISection

_LOCAL = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+/=?^_`{|}~-."
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# a host name that ends in a top-level domain: package@1.2.3 is not masked
_DOMAIN = re.compile(rf"@(?:{_LABEL}\.)+(?:[A-Za-z]{{2,63}}|xn--[A-Za-z0-9-]{{2,59}})(?![\w-])")
# RFC 5322's dot-atom
_ATOMS = re.compile(r"[\w!#$%&'*+/=?^`{|}~-]+(?:\.[\w!#$%&'*+/=?^`{|}~-]+)*\Z", re.ASCII)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = re.compile(rf"(?<![\d.])(?:{_OCTET}\.){{3}}{_OCTET}(?!\.?\d)", re.ASCII)
# global unicast addresses are 2000::/3 (RFC 4291); other double colons are mostly C++
_IPV6 = re.compile(r"(?<![\w:.])[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]*(?:[0-9A-Fa-f]|::)(?!\w)")

Spans = Iterator[tuple[int, int]]


class PII:
    """The cleaning step of `PIISection`."""

    def __init__(self, section: PIISection) -> None:
        pairs = ((section.email, emails), (section.ip, public_ipv4), (section.ipv6, public_ipv6))
        self._masks: list[tuple[str, Callable[[str], Spans]]] = [(by, find) for by, find in pairs if by is not None]

    def __call__(self, document: Document, _: Mapping[str, Any]) -> Document | str:
        """Implements `chain.Rule`."""
        masked = document.text
        for replacement, find in self._masks:
            masked = _replace(masked, find(masked), by=replacement)
        return document if masked is document.text else Document(masked)


def emails(text: str) -> Spans:
    """Spans of the email addresses, from left to right."""
    free, at = 0, text.find("@")
    while at >= 0:
        before = text[max(free, at - 64) : at]  # RFC 5321: at most 64 characters before the @
        local = _ATOMS.search(before[len(before.rstrip(_LOCAL)) :])
        domain = _DOMAIN.match(text, at) if local else None
        if local and domain:
            free = domain.end()
            yield at - (local.end() - local.start()), free
        at = text.find("@", at + 1)


def public_ipv4(text: str) -> Spans:
    """Spans of the public IPv4 addresses, except in longer runs of numbers and dots, such as versions."""
    return _addresses(text, _IPV4) if _may_have_ipv4(text) else iter(())


def public_ipv6(text: str) -> Spans:
    """Spans of the public IPv6 addresses."""
    return _addresses(text, _IPV6) if _may_have_ipv6(text) else iter(())


def _may_have_ipv4(text: str) -> bool:
    """Whether two consecutive parts between dots are numbers of at most three digits."""
    parts = text.split(".")
    inner = [part.isdigit() and len(part) <= 3 for part in parts]
    return any(a and b for a, b in pairwise(inner))


def _may_have_ipv6(text: str) -> bool:
    """Whether a part like `2001:` is followed by at most four characters and another colon."""
    parts = text.split(":")
    return any(len(part) <= 4 and before[-4:-3] in ("2", "3") for before, part in pairwise(parts))


def _addresses(text: str, pattern: re.Pattern[str]) -> Spans:
    for match in pattern.finditer(text):
        try:
            public = ipaddress.ip_address(match.group()).is_global
        except ValueError:
            continue
        if public:
            yield match.span()


def _replace(text: str, spans: Spans, *, by: str) -> str:
    """Replaces the spans; returns the same object if there are none."""
    parts, end = [], 0
    for start, stop in spans:
        parts += [text[end:start], by]
        end = stop
    return "".join([*parts, text[end:]]) if parts else text
