"""C4 and FineWeb filters: each rule at its threshold."""

from __future__ import annotations

import pytest

from tests.data_prep.clean.one_step import PROSE, run

GOOD = [f"The mill turned on day {i}." for i in range(5)]


@pytest.mark.parametrize("step", ["c4", "fineweb_quality"])
def test_plain_prose_passes(step: str) -> None:
    assert run(step, PROSE).strip() == PROSE.strip()


@pytest.mark.parametrize(
    "line",
    [
        "Home | About | Contact",
        "It goes on and on...",
        "Too short.",
        f"A word of {'x' * 1001} letters.",
        "Please enable JavaScript in your browser.",
        "By going on you accept our privacy policy.",
        "This site uses cookies to serve you.",
    ],
)
def test_c4_removes_lines_that_are_not_sentences(line: str) -> None:
    assert run("c4", "\n".join([*GOOD, line])) == "\n".join(GOOD)


@pytest.mark.parametrize("end", [".", "!", "?", '"', "'"])
def test_c4_keeps_lines_that_end_in_a_terminal_mark(end: str) -> None:
    text = "\n".join([*GOOD, f"  Then it went on{end}  "])
    assert run("c4", text) == "\n".join([*GOOD, f"Then it went on{end}"])


def test_c4_removes_citations() -> None:
    text = "\n".join([*GOOD, "The wheel[12] is old[citation needed] indeed[edit]."])
    assert run("c4", text).endswith("\nThe wheel is old indeed.")


def test_c4_drops_texts_with_placeholders_or_code() -> None:
    assert run("c4", "\n".join([*GOOD, "Lorem ipsum dolor sit amet."])) == "-- lorem ipsum"
    assert run("c4", "\n".join([*GOOD, "It says { and nothing else."])) == "-- curly bracket"


def test_c4_requires_five_sentences_in_any_layout() -> None:
    assert run("c4", " ".join(GOOD)) == " ".join(GOOD)
    assert run("c4", "\n".join(GOOD[:4])) == "-- too few sentences"
    assert run("c4", " ".join(GOOD[:4])) == "-- too few sentences"
    assert run("c4", "Mr. Miller met J. S. Mill at 3.15 p.m. and left.", min_sentences=3) != ""


def test_c4_rules_can_be_switched_off() -> None:
    text = "no full stop here {\nlorem ipsum with javascript and cookie policy [1]"
    keys = dict.fromkeys(
        ["terminal_punctuation", "citations", "lorem_ipsum", "javascript", "curly_brackets", "policies"], False
    )
    assert run("c4", text, min_sentences=None, **keys) == text


def fineweb(text: str, **rule: object) -> str:
    names = ("min_ended_lines", "max_short_lines", "max_duplicate_characters", "max_line_feeds")
    return run("fineweb_quality", text, **dict.fromkeys(names) | rule)


def test_fineweb_requires_that_12_percent_of_the_lines_end_a_sentence() -> None:
    def text(ended: int) -> str:
        return "\n".join([f"{i} ends。" for i in range(ended)] + [f"{i} does not" for i in range(100 - ended)])

    assert fineweb(text(12), min_ended_lines=0.12) == text(12)
    assert fineweb(text(11), min_ended_lines=0.12) == "-- few lines end a sentence"


def test_fineweb_requires_a_third_of_the_lines_longer_than_30_characters() -> None:
    def text(short: int) -> str:
        return "\n\n".join(["s" * 30] * short + ["l" * 31] * (100 - short))

    assert fineweb(text(67), max_short_lines=0.67) == text(67)
    assert fineweb(text(68), max_short_lines=0.67) == "-- many short lines"


def test_fineweb_allows_one_percent_of_characters_in_duplicate_lines() -> None:
    text = "\n".join(["ab", "x" * 196, "ab"])
    assert fineweb(text, max_duplicate_characters=0.01) == text
    assert (
        fineweb("\n".join(["abc", "x" * 196, "abc"]), max_duplicate_characters=0.01)
        == "-- characters in duplicate lines"
    )


def test_fineweb_limits_line_feeds_per_word() -> None:
    text = "one two three four five six seven eight nine ten\n\n\n"
    assert fineweb(text, max_line_feeds=0.3) == text
    assert fineweb(text + "\n", max_line_feeds=0.3) == "-- many line feeds"


def test_fineweb_drops_blank_texts() -> None:
    assert run("fineweb_quality", " \n\t\n") == "-- no lines"
