"""Steps that read or change the text itself: repair as ftfy does, language identification, PII masking."""

from __future__ import annotations

import time
from typing import Any

import ftfy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.clean.chain import Chain, CleanedText, build_chain
from data_prep.config.cleaning import parse_steps
from foundation.errors import ConfigError
from tests.data_prep.clean.one_step import PROSE, run

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


GERMAN = "Die Mühle steht dort, wo der Fluss die Hügel verlässt, und ein Obergraben führt ihr das Wasser zu. " * 3
FRENCH = "Le moulin se trouve là où la rivière quitte les collines, et un canal lui amène l'eau. " * 3


def test_texts_in_other_languages_are_dropped() -> None:
    assert run("language", PROSE, keep=["en"]) == PROSE
    assert run("language", GERMAN, keep=["en"]) == "-- other language"
    assert run("language", FRENCH, keep=["en", "de"]) == "-- other language"
    assert run("language", GERMAN, keep=["en", "de"]) == GERMAN


def test_the_kept_languages_must_reach_min_share() -> None:
    both = FRENCH + GERMAN
    assert run("language", both, keep=["fr"], min_share=0.25) == both
    assert run("language", both, keep=["fr"], min_share=0.75) == "-- other language"
    assert run("language", both, keep=["fr", "de"], min_share=0.9) == both


def test_the_language_of_a_long_text_is_that_of_its_middle() -> None:
    text = GERMAN + FRENCH * 5 + GERMAN
    assert run("language", text, keep=["fr"], characters=1000) == text


def test_characters_that_cld2_refuses_are_ignored() -> None:
    odd = PROSE + "\x01\x7f\ud800\ufffe"
    assert run("language", odd, keep=["en"]) == odd


def test_a_text_without_words_is_in_no_language() -> None:
    assert run("language", "1 2 3", keep=["en"]) == "-- other language"


def test_an_unknown_language_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"clean\.0\.keep.*\n.*no such language"):
        run("language", "", keep=["english"])


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Write to jane.doe+mill@mail.example.co.uk, please.", "Write to email@example.com, please."),
        ("<a@b.org>;c@d.net", "<email@example.com>;email@example.com"),
        ("a@b@c.org", "a@email@example.com"),
        ("@property and foo @ bar.com and npm left-pad@1.3.0", None),
        ("user@localhost", None),
        ("Ask 8.8.8.8 or 1.1.1.1.", "Ask 192.0.2.1 or 192.0.2.1."),
        ("10.0.0.1, 127.0.0.1, 192.168.1.1, 172.16.0.9", None),
        ("version 8.8.8.8.1, 1.8.8.8.8 and 300.8.8.8, 8.8.8", None),
        ("[2606:4700:4700::1111]:53", "[2001:db8::1]:53"),
        ("std::vector<int>::size, 12:30:45, dead::beef, 2001:db8::7", None),
    ],
)
def test_addresses_are_masked_and_similar_strings_are_not(text: str, masked: str | None) -> None:
    assert run("pii", text) == (masked or text)


def test_masking_can_be_switched_off_per_kind_of_address() -> None:
    text = "a@b.org 8.8.8.8 2606:4700:4700::1111"
    assert run("pii", text, email=None, ip=None, ipv6=None) == text
    assert run("pii", text, email="EMAIL", ip="IP", ipv6="IP") == "EMAIL IP IP"


def test_masking_does_not_depend_on_earlier_matches() -> None:
    assert run("pii", "a@b.org c@d.org") == "email@example.com email@example.com"


REPEATED_PIECES = ["@", "a.", "1.", "2001:", "x@y.", "@a", ".", "a ", "\n", "x", "... ", "Â", "&a;", "é\n", "1.1.1.1 "]


@pytest.mark.parametrize("piece", REPEATED_PIECES)
def test_repetitive_texts_take_linear_time(piece: str) -> None:
    text = piece * (300_000 // len(piece))
    start = time.process_time()
    for step in ("unicode", "gopher_repetition", "gopher_quality", "fineweb_quality", "pii"):
        run(step, text)
    run("c4", text, max_word_length=None, min_words_per_line=0, terminal_punctuation=False)
    assert time.process_time() - start < 15  # under one second here; a quadratic rule would take hours
