"""Language identification by CLD2 (Chromium's compact language detector), whose model is compiled into pycld2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_prep.clean.document import Document
from data_prep.clean.optional import import_optional
from data_prep.config.cleaning import LanguageSection
from foundation.errors import ConfigError
from foundation.section import suggest


class Language:
    """The cleaning step of `LanguageSection`."""

    def __init__(self, section: LanguageSection, *, field: str) -> None:
        cld2 = import_optional("pycld2", package="pycld2", field=field)
        _check(section.keep, {code for _, code in cld2.LANGUAGES}, field=f"{field}.keep")
        self._detect, self._error = cld2.detect, cld2.error
        self._keep = frozenset(section.keep)
        self._section = section

    def __call__(self, document: Document, _: Mapping[str, Any]) -> Document | str:
        """Implements `chain.Rule`."""
        percent = sum(share for _, code, share, _ in self._detect_languages(document.text) if code in self._keep)
        return document if percent >= 100 * self._section.min_share else "other language"

    def _detect_languages(self, text: str) -> Any:
        """Detects up to three languages: (name, code, percent of the text, score) each."""
        size = self._section.characters
        if len(text) > size:
            start = (len(text) - size) // 2
            text = text[start : start + size]
        try:
            return self._detect(text, isPlainText=True)[2]
        except (self._error, UnicodeEncodeError):
            return self._detect(_printable(text), isPlainText=True)[2]


def _printable(text: str) -> str:
    """Replaces the characters that CLD2 refuses by spaces: controls, lone surrogates and noncharacters."""
    return "".join(c if c.isprintable() else " " for c in text)


def _check(codes: list[str], known: set[str], *, field: str) -> None:
    for code in codes:
        if code not in known:
            near = suggest(code, sorted(known))
            remedy = f"did you mean '{near}'?" if near else f"the codes are: {', '.join(sorted(known))}"
            raise ConfigError(field, code, why="CLD2 has no such language code", remedy=remedy)
