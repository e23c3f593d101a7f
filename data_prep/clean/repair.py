"""Unicode normalisation and repair of mojibake, by ftfy: its very output, at once where it would change nothing."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from data_prep.clean.optional import need
from data_prep.clean.statistics import Statistics
from data_prep.config.cleaning import UnicodeSection

# what ftfy removes or replaces wherever it stands: C0 and C1 controls, escapes, lone surrogates, deprecated format
# characters, the byte-order mark, and line breaks of other systems
_ODD = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\u206a-\u206f\ufeff\ufff9-\ufffc\ud800-\udfff]")
_ODD_BREAKS = re.compile("[\r\u2028\u2029\x85]")
_ODD_ASCII = bytes([*range(9), 0x0B, *range(0x0E, 0x20), 0x7F])


class Repair:
    """See `UnicodeSection`."""

    def __init__(self, section: UnicodeSection, *, field: str) -> None:
        self._ftfy = need("ftfy", package="ftfy", field=field)
        self._is_bad = need("ftfy.badness", package="ftfy", field=field).is_bad
        self._entity = need("ftfy.chardata", package="ftfy", field=field).HTML_ENTITY_RE
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

    def __call__(self, text: Statistics, _: Mapping[str, Any]) -> Statistics | str:
        """See `chain.Rule`."""
        if self._sound(text.text):
            return text
        # "auto" means that entities stay from the first line with a "<" on
        tag = text.text.find("<") if self._section.html_entities == "auto" else -1
        start = len(text.text) if tag < 0 else text.text.rfind("\n", 0, tag) + 1
        after = self._config._replace(unescape_html=False)
        fixed = self._fixed(text.text[:start], self._config) + self._fixed(text.text[start:], after)
        return text if fixed == text.text else Statistics(fixed)

    def _fixed(self, text: str, config: Any) -> str:
        """ftfy works by the line, so that lines which are sound need not be shown to it: they are found by halving."""
        if self._sound(text):
            return text
        middle = text.find("\n", len(text) // 2) + 1 or text.rfind("\n", 0, len(text) // 2) + 1
        if middle in (0, len(text)):
            fixed: str = self._ftfy.fix_text(text, config)
            return fixed
        return self._fixed(text[:middle], config) + self._fixed(text[middle:], config)

    def _sound(self, text: str) -> bool:
        """Whether ftfy would return the text as it is. It works by the line; what no text has, no line has."""
        if self._section.html_entities and "&" in text and self._entity.search(text):
            return False
        if self._section.line_breaks and _ODD_BREAKS.search(text):
            return False
        if text.isascii():
            # bytes.translate looks at 1 GB/s, `re` at a quarter of that
            encoded = text.encode("ascii")
            return len(encoded.translate(None, _ODD_ASCII)) == len(encoded)
        return self._sound_beyond_ascii(text)

    def _sound_beyond_ascii(self, text: str) -> bool:
        section, form = self._section, self._section.normalization
        if section.ligatures or section.width or section.quotes:
            return False
        if _ODD.search(text) or (form is not None and not unicodedata.is_normalized(form, text)):
            return False
        # a line of ASCII is never bad, and the test is slow; the line feed is part of what it looks at
        suspects = "".join([f"{line}\n" for line in text.split("\n") if not line.isascii()])
        return not section.mojibake or not self._is_bad(suspects)
