"""Language identification by CLD2 (Chromium's compact language detector), whose model is compiled into pycld2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_prep.clean.optional import need
from data_prep.clean.statistics import Statistics
from data_prep.config.cleaning import LanguageSection
from headrace.base.errors import ConfigError
from headrace.base.section import suggest


class Language:
    """See `LanguageSection`."""

    def __init__(self, section: LanguageSection, *, field: str) -> None:
        cld2 = need("pycld2", package="pycld2", field=field)
        _check(section.keep, {code for _, code in cld2.LANGUAGES}, field=f"{field}.keep")
        self._detect, self._error = cld2.detect, cld2.error
        self._keep = frozenset(section.keep)
        self._section = section

    def __call__(self, text: Statistics, _: Mapping[str, Any]) -> Statistics | str:
        """See `chain.Rule`."""
        percent = sum(share for _, code, share, _ in self._languages(text.text) if code in self._keep)
        return text if percent >= 100 * self._section.min_share else "other language"

    def _languages(self, text: str) -> Any:
        """(name, code, percent of the text, score) of up to three languages."""
        size = self._section.characters
        if len(text) > size:
            start = (len(text) - size) // 2
            text = text[start : start + size]
        try:
            return self._detect(text, isPlainText=True)[2]
        except (self._error, UnicodeEncodeError):
            return self._detect(_plain(text), isPlainText=True)[2]


def _plain(text: str) -> str:
    """Without the characters that CLD2 refuses: controls, lone surrogates, and code points that are none."""
    return "".join(c if c.isprintable() else " " for c in text)


def _check(codes: list[str], known: set[str], *, field: str) -> None:
    for code in codes:
        if code not in known:
            near = suggest(code, sorted(known))
            remedy = f"did you mean '{near}'?" if near else f"the codes are: {', '.join(sorted(known))}"
            raise ConfigError(field, code, why="CLD2 knows no such language", remedy=remedy)
