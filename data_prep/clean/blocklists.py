"""Blocklists of domains, URLs and words, from the user's files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from data_prep.clean.document import Document
from data_prep.clean.lists import read_entries
from data_prep.clean.ngrams import KeySet
from data_prep.clean.words import PLAIN_WORDS
from data_prep.config.cleaning import UrlBlocklistSection, WordBlocklistSection
from foundation.errors import ConfigError

_WORD = re.compile(r"\w+")
_NOT_IN_URL_WORDS = re.compile(r"[^a-z0-9]+")


class UrlBlocklist:
    """The cleaning step of `UrlBlocklistSection`."""

    def __init__(self, section: UrlBlocklistSection, *, field: str) -> None:
        if not section.files():
            raise ConfigError(field, why="the step has no blocklist", remedy="give files as domains, urls or words")
        domains = read_entries(section.domains, field=f"{field}.domains")
        self._domains = frozenset(domain.lower().strip(".") for domain in domains)
        self._urls = frozenset(map(_normalized, read_entries(section.urls, field=f"{field}.urls")))
        self._words = frozenset(word.lower() for word in read_entries(section.words, field=f"{field}.words"))
        self._section = section

    def __call__(self, document: Document, fields: Mapping[str, Any]) -> Document | str:
        """Implements `chain.Rule`."""
        url = fields.get(self._section.field)
        if not isinstance(url, str) or not url:
            return document if self._section.missing == "keep" else "no URL"
        if not self._domains.isdisjoint(_domains(url)):
            return "blocked domain"
        if self._urls and _normalized(url) in self._urls:
            return "blocked URL"
        if self._words and not self._words.isdisjoint(_NOT_IN_URL_WORDS.split(url.lower())):
            return "blocked word in URL"
        return document


class WordBlocklist:
    """The cleaning step of `WordBlocklistSection`. It ignores case, and no letter or digit may be next to a match."""

    def __init__(self, section: WordBlocklistSection, *, field: str) -> None:
        terms = sorted({term.lower() for term in read_entries(section.words, field=f"{field}.words")})
        # a text can contain a term only if it contains its first word; terms without letters are always searched for
        self._by_first_word: dict[int, list[re.Pattern[str]]] = {}
        self._search_always: list[re.Pattern[str]] = []
        if section.match == "substrings":
            self._search_always.append(re.compile("|".join(map(re.escape, terms))))
        else:
            for term in terms:
                first = _WORD.search(term)
                patterns = (
                    self._by_first_word.setdefault(PLAIN_WORDS.key(first.group()), []) if first else self._search_always
                )
                patterns.append(_whole_words(term))
        self._first_words = KeySet(np.fromiter(self._by_first_word, np.uint64))

    def __call__(self, document: Document, _: Mapping[str, Any]) -> Document | str:
        """Implements `chain.Rule`."""
        patterns = list(self._search_always)
        if self._by_first_word:
            for key in set(self._first_words.intersection(document.folded_keys).tolist()):
                patterns += self._by_first_word[key]
        return "blocked word" if any(pattern.search(document.folded) for pattern in patterns) else document


def _whole_words(term: str) -> re.Pattern[str]:
    """Pattern of a term: any whitespace between its words, and no letter or digit next to it."""
    return re.compile(r"(?<!\w)" + r"\s+".join(map(re.escape, term.split())) + r"(?!\w)")


def _domains(url: str) -> Iterator[str]:
    """The host of a URL and all its parent domains."""
    try:
        host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:
        return
    labels = host.strip(".").split(".")
    for start in range(len(labels)):
        yield ".".join(labels[start:])


def _normalized(url: str) -> str:
    """The URL without scheme, fragment and final slash."""
    return url.partition("#")[0].rpartition("://")[2].rstrip("/")
