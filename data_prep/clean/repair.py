"""Unicode normalization and mojibake repair: ftfy's output, with a fast path for texts that ftfy would not change."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from data_prep.clean.document import Document
from data_prep.clean.optional import import_optional
from data_prep.config.cleaning import UnicodeSection

# characters that ftfy always removes or replaces: C0 and C1 controls, escapes, lone surrogates, deprecated format
# characters, the byte-order mark, and line breaks other than a line feed
_REMOVED = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\u206a-\u206f\ufeff\ufff9-\ufffc\ud800-\udfff]")
_OTHER_LINE_BREAKS = re.compile("[\r\u2028\u2029\x85]")
_REMOVED_ASCII = bytes([*range(9), 0x0B, *range(0x0E, 0x20), 0x7F])


class Repair:
    """The cleaning step of `UnicodeSection`."""

    def __init__(self, section: UnicodeSection, *, field: str) -> None:
        self._ftfy = import_optional("ftfy", package="ftfy", field=field)
        self._is_bad = import_optional("ftfy.badness", package="ftfy", field=field).is_bad
        self._entity = import_optional("ftfy.chardata", package="ftfy", field=field).HTML_ENTITY_RE
        self._section = section
        self._config = self._ftfy.TextFixerConfig(
            unescape_html=section.html_entities,
            remove_terminal_escapes=section.control_characters,
            fix_encoding=section.mojibake,
            fix_latin_ligatures=section.ligatures,
            fix_character_width=section.width,
            uncurl_quotes=section.quotes,
            fix_line_breaks=section.line_breaks,
            fix_surrogates=section.control_characters,
            remove_control_chars=section.control_characters,
            normalization=section.normalization,
            explain=False,
        )

    def __call__(self, document: Document, _: Mapping[str, Any]) -> Document | str:
        """Implements `chain.Rule`."""
        if self._is_unchanged(document.text):
            return document
        # "auto" keeps entities from the first line with a "<" onwards
        tag = document.text.find("<") if self._section.html_entities == "auto" else -1
        start = len(document.text) if tag < 0 else document.text.rfind("\n", 0, tag) + 1
        after = self._config._replace(unescape_html=False)
        fixed = self._fix(document.text[:start], self._config) + self._fix(document.text[start:], after)
        return document if fixed == document.text else Document(fixed)

    def _fix(self, text: str, config: Any) -> str:
        """Runs ftfy, which works line by line, only on lines that it would change; bisection finds them."""
        if self._is_unchanged(text):
            return text
        middle = text.find("\n", len(text) // 2) + 1 or text.rfind("\n", 0, len(text) // 2) + 1
        if middle in (0, len(text)):
            fixed: str = self._ftfy.fix_text(text, config)
            return fixed
        return self._fix(text[:middle], config) + self._fix(text[middle:], config)

    def _is_unchanged(self, text: str) -> bool:
        """Whether ftfy, which works line by line, would certainly return the text unchanged."""
        if self._section.html_entities and "&" in text and self._entity.search(text):
            return False
        if self._section.line_breaks and _OTHER_LINE_BREAKS.search(text):
            return False
        if text.isascii():
            # bytes.translate runs at 1 GB/s, `re` at a quarter of that
            encoded = text.encode("ascii")
            return len(encoded.translate(None, _REMOVED_ASCII)) == len(encoded)
        return self._unicode_is_unchanged(text)

    def _unicode_is_unchanged(self, text: str) -> bool:
        section, form = self._section, self._section.normalization
        if section.ligatures or section.width or section.quotes:
            return False
        if _REMOVED.search(text) or (form is not None and not unicodedata.is_normalized(form, text)):
            return False
        # ASCII lines are never mojibake, and the test for it is slow; the line feed is part of the test's input
        suspects = "".join([f"{line}\n" for line in text.split("\n") if not line.isascii()])
        return not section.mojibake or not self._is_bad(suspects)
