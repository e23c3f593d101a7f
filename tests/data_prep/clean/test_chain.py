"""The cleaning chain: order, counts and config errors; and the segmentation into words."""

from __future__ import annotations

import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from data_prep.clean import chain, words
from data_prep.clean.chain import CleanedText, Dropped, build_chain
from data_prep.clean.ngrams import NGrams
from data_prep.config.cleaning import SECTIONS, CleaningSteps, StepSection, parse_steps
from foundation.errors import ConfigError
from foundation.section import Section, parse
from tests.data_prep.clean.one_step import PROSE


class Config(Section):
    """A config with a cleaning chain, like that of a job."""

    clean: CleaningSteps = Field([], description="the cleaning steps")


def test_steps_run_in_order_and_the_first_drop_ends_it() -> None:
    here = build_chain(parse_steps([{"step": "pii"}, {"step": "c4"}, {"step": "gopher_quality"}]))
    assert here.clean("Mail a@b.org", {}) == Dropped("c4", "too few sentences")
    assert here.clean(PROSE + "Mail a@b.org now, please.\nmenu", {}) == CleanedText(
        PROSE + "Mail email@example.com now, please."
    )
    assert here.edits == {"pii": 2, "c4": 1}


def test_an_empty_chain_keeps_everything() -> None:
    assert build_chain([]).clean("", {}) == CleanedText("")


@pytest.mark.parametrize("text", ["", " ", "\n\n", ".", "a", "\ud800", "#", "{", "@", "http://", "0.0.0.0", "漢" * 3])
def test_no_rule_fails_on_tiny_texts(text: str) -> None:
    for step in ("unicode", "gopher_repetition", "gopher_quality", "c4", "fineweb_quality", "pii"):
        for section in ({}, {"words": "whitespace"}) if "words" in SECTIONS[step].model_fields else ({},):
            assert build_chain(parse_steps([{"step": step, **section}])).clean(text, {})


def test_the_record_fields_that_steps_read_are_listed_once() -> None:
    raw = [{"step": "url_blocklist", "field": "link", "domains": ["a.txt"]}, {"step": "pii"}]
    raw += [{"step": "datatrove", "filter": "URLFilter", "metadata": ["url", "link"], "reads": ["b.txt"]}]
    steps = parse_steps(raw)
    assert chain.record_fields(steps) == ("link", "url")
    assert [step.files() for step in steps] == [["a.txt"], [], ["b.txt"]]
    assert chain.step_label(steps[2]) == "datatrove.URLFilter"


def test_the_versions_of_the_steps_dependencies_are_listed() -> None:
    found = chain.dependency_versions(parse_steps([{"step": "unicode"}, {"step": "gopher_quality", "words": "spacy"}]))
    assert set(found) == {"unicode", "ftfy", "spacy"}
    assert re.fullmatch(r"\d+(\.\d+)+", found["ftfy"])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"step": "gopher_qualty"}, r"clean\.0\.step.*\n.*no such step\n.*did you mean 'gopher_quality'"),
        ({}, r"clean\.0\.step\n.*no such step\n.*the steps are: unicode, language"),
        (
            {"step": "c4", "min_sentence": 3},
            r"clean\.0\.min_sentence = 3\n.*no such key\n.*did you mean 'min_sentences'",
        ),
        ({"step": "fineweb_quality", "max_short_lines": 67}, r"clean\.0\.max_short_lines = 67\n"),
        ({"step": "language"}, r"clean\.0\.keep\n.*required"),
        ({"step": "gopher_quality", "words": "words"}, r"clean\.0\.words = 'words'\n"),
    ],
)
def test_wrong_steps_and_keys_are_refused_with_the_nearest_valid_one(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(Config, {"clean": [raw]})


def test_sections_can_be_dumped_and_parsed_again() -> None:
    config = parse(Config, {"clean": [{"step": "c4", "min_sentences": 3}, {"step": "pii", "ip": None}]})
    assert parse(Config, config.model_dump()) == config


def test_every_field_of_every_step_has_a_description() -> None:
    for section in SECTIONS.values():
        assert issubclass(section, StepSection)
        assert section.__doc__
        assert all(info.description for info in section.model_fields.values())


MIXED = st.text(st.sampled_from("ab1 2,.-=/'’@\n#é\u3000漢_😀\x1c\x85٣"), max_size=30)
PUNCTUATED = re.compile(r"\w+(?:(?:[.'’@]|(?<=\d),(?=\d))\w+)*|\.{2,}|[-~|/\\^]+|[^\w\s]")


@given(MIXED)
@settings(max_examples=500, deadline=None)
def test_words_are_those_of_the_equivalent_regular_expression(text: str) -> None:
    for splitter, found in (
        (words.WHITESPACE, text.split()),
        (words.PUNCTUATION, PUNCTUATED.findall(text)),
        (words.PLAIN_WORDS, re.findall(r"\w+", text)),
    ):
        here = splitter.words(text)
        assert here.length.tolist() == [len(word) for word in found]
        assert here.letters.tolist() == [any(map(str.isalpha, word)) for word in found]
        assert here.ngrams.of(1).tolist() == [splitter.key(word) for word in found]


@given(st.lists(st.sampled_from(["a", "b", "ab", "é", "0", "00"]), max_size=40), st.integers(1, 13))
@settings(max_examples=200, deadline=None)
def test_equal_ngrams_have_equal_keys_and_different_ones_do_not(pieces: list[str], n: int) -> None:
    keys = words.WHITESPACE.words(" ".join(pieces)).ngrams.of(n).tolist()
    grams = [tuple(pieces[i : i + n]) for i in range(len(pieces) - n + 1)]
    assert len(keys) == len(grams)
    assert len(set(keys)) == len(set(grams)) == len(set(zip(keys, grams, strict=True)))


def test_word_keys_are_the_same_in_every_process_and_for_every_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the quick brown fox " * 200
    whole = words.WHITESPACE.keys(text)
    assert whole[0] == KEY_OF_THE
    monkeypatch.setattr(words, "_BLOCK", 50)
    assert (words.WHITESPACE.keys(text) == whole).all()
    assert (words.WHITESPACE.keys("x" * 400 + " the") == [words.WHITESPACE.key("x" * 400), KEY_OF_THE]).all()


KEY_OF_THE = 18435446918479136368
"""If it changes, other n-grams collide (with probability 2^-64)."""


def test_a_text_shorter_than_n_words_has_no_ngrams() -> None:
    assert len(NGrams(words.WHITESPACE.keys("one two")).of(3)) == 0


def test_memory_is_linear_in_the_length_of_the_text() -> None:
    text = "the mill by the river turns and turns " * 100_000  # 3.8 million characters
    here = build_chain(parse_steps([{"step": "gopher_quality", "max_words": None}]))
    here.clean("warm", {})
    tracemalloc.start()
    assert isinstance(here.clean(text, {}), CleanedText)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60 * len(text)  # bytes
