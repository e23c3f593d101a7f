"""The unicode step gives the output of ftfy."""

from __future__ import annotations

from typing import Any

import ftfy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.clean.chain import Chain, CleanedText, build_chain
from data_prep.config.cleaning import parse_steps
from tests.data_prep.clean.one_step import run

PIECES = [
    *"ab <&\n\r\x00\x1b\x85\x92\xa0\ufeff\u2028漢ﬁＡ“—é",
    "&amp;",
    "&lt;",
    "&#39;",
    "Ã©",
    "â€™",
    "ÃƒÂ±",
    "\x1b[0m",
    "\ud83d",
    "\ude00",
    "e\u0301",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)

KEYS: list[dict[str, Any]] = [
    {},
    {"normalization": None},
    {"normalization": "NFKC"},
    {"html_entities": True},
    {"html_entities": False, "mojibake": False},
    {"line_breaks": True, "control_characters": False},
    {"quotes": True, "ligatures": True, "width": True},
]


def chain(**keys: Any) -> Chain:
    return build_chain(parse_steps([{"step": "unicode", **keys}]))


def assert_same_as_ftfy(keys: dict[str, Any], text: str) -> None:
    names = {
        "html_entities": "unescape_html",
        "mojibake": "fix_encoding",
        "line_breaks": "fix_line_breaks",
        "quotes": "uncurl_quotes",
        "ligatures": "fix_latin_ligatures",
        "width": "fix_character_width",
        "normalization": "normalization",
    }
    base = {
        "uncurl_quotes": False,
        "fix_latin_ligatures": False,
        "fix_character_width": False,
        "fix_line_breaks": False,
    }
    theirs = base | {names[key]: value for key, value in keys.items() if key in names}
    if not keys.get("control_characters", True):
        theirs |= dict.fromkeys(["remove_control_chars", "remove_terminal_escapes", "fix_surrogates"], False)
    outcome = chain(**keys).clean(text, {})
    assert (outcome.text if isinstance(outcome, CleanedText) else "") == ftfy.fix_text(text, **theirs)


@pytest.mark.parametrize("keys", KEYS)
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_the_output_is_that_of_ftfy(keys: dict[str, Any], text: str) -> None:
    assert_same_as_ftfy(keys, text)


def test_mojibake_is_repaired_only_in_the_lines_that_contain_it() -> None:
    good = "Une journée à la rivière.\n" * 50
    assert run("unicode", good + "La riviÃ¨re dâ€™Ã©tÃ©.\n" + good) == good + "La rivière d’été.\n" + good


def test_texts_are_normalized_to_nfc() -> None:
    assert run("unicode", "riviere\u0300") == "rivierè"


def test_only_texts_that_change_count_as_edits() -> None:
    here = chain()
    for text in ("Plain.", "été", "Ã©tÃ©", "a\x00b"):
        here.clean(text, {})
    assert here.edits == {"unicode": 2}


def test_a_text_of_control_characters_only_is_dropped() -> None:
    assert run("unicode", "\x00\x01") == "-- nothing left"
