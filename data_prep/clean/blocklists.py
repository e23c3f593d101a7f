"""Lists of domains, URLs and words that the user gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from data_prep.clean.lists import entries
from data_prep.clean.ngrams import KeySet
from data_prep.clean.statistics import Statistics
from data_prep.clean.words import PLAIN_WORDS
from data_prep.config.cleaning import UrlBlocklistSection, WordBlocklistSection
from headrace.base.errors import ConfigError

_WORD = re.compile(r"\w+")
_NOT_IN_URL_WORDS = re.compile(r"[^a-z0-9]+")


class UrlBlocklist:
    """See `UrlBlocklistSection`."""

    def __init__(self, section: UrlBlocklistSection, *, field: str) -> None:
        if not section.files():
            raise ConfigError(field, why="there is no list", remedy="give files as domains, urls or words")
        domains = entries(section.domains, field=f"{field}.domains")
        self._domains = frozenset(domain.lower().strip(".") for domain in domains)
        self._urls = frozenset(map(_bare, entries(section.urls, field=f"{field}.urls")))
        self._words = frozenset(word.lower() for word in entries(section.words, field=f"{field}.words"))
        self._section = section

    def __call__(self, text: Statistics, fields: Mapping[str, Any]) -> Statistics | str:
        """See `chain.Rule`."""
        url = fields.get(self._section.field)
        if not isinstance(url, str) or not url:
            return text if self._section.missing == "keep" else "no URL"
        if not self._domains.isdisjoint(_domains(url)):
            return "blocked domain"
        if self._urls and _bare(url) in self._urls:
            return "blocked URL"
        if self._words and not self._words.isdisjoint(_NOT_IN_URL_WORDS.split(url.lower())):
            return "blocked word in URL"
        return text


class WordBlocklist:
    """See `WordBlocklistSection`. Case does not matter; a word is blocked where no letter or digit stands beside it."""

    def __init__(self, section: WordBlocklistSection, *, field: str) -> None:
        terms = sorted({term.lower() for term in entries(section.words, field=f"{field}.words")})
        # only a text with the first word of a term can have the term; a term without letters has to be looked for
        self._by_first: dict[int, list[re.Pattern[str]]] = {}
        self._always: list[re.Pattern[str]] = []
        if section.match == "substrings":
            self._always.append(re.compile("|".join(map(re.escape, terms))))
        else:
            for term in terms:
                first = _WORD.search(term)
                known = self._by_first.setdefault(PLAIN_WORDS.key(first.group()), []) if first else self._always
                known.append(_whole(term))
        self._first = KeySet(np.fromiter(self._by_first, np.uint64))

    def __call__(self, text: Statistics, _: Mapping[str, Any]) -> Statistics | str:
        """See `chain.Rule`."""
        patterns = list(self._always)
        if self._by_first:
            for key in set(self._first.common(text.folded_keys).tolist()):
                patterns += self._by_first[key]
        return "blocked word" if any(pattern.search(text.folded) for pattern in patterns) else text


def _whole(term: str) -> re.Pattern[str]:
    """The term, with any whitespace between its words, and no letter or digit beside it."""
    return re.compile(r"(?<!\w)" + r"\s+".join(map(re.escape, term.split())) + r"(?!\w)")


def _domains(url: str) -> Iterator[str]:
    """The host of the URL and every domain above it."""
    try:
        host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:
        return
    labels = host.strip(".").split(".")
    for start in range(len(labels)):
        yield ".".join(labels[start:])


def _bare(url: str) -> str:
    """Without scheme, fragment and final slash."""
    return url.partition("#")[0].rpartition("://")[2].rstrip("/")
