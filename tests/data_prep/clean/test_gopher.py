"""Gopher filters: every rule drops a text just beyond its threshold, and not at it."""

from __future__ import annotations

import pytest

from tests.data_prep.clean.one_step import PROSE, run


def words(count: int, *, start: int = 0) -> str:
    """`count` different words of five letters."""
    return " ".join(_word(i) for i in range(start, start + count))


def _word(i: int) -> str:
    return "".join("abcdefghij"[i // 10**k % 10] for k in range(5))


def lines(count: int) -> list[str]:
    return [words(10, start=10 * i) for i in range(count)]


LINE_RULES = ("duplicate_lines", "duplicate_paragraphs", "duplicate_line_characters", "duplicate_paragraph_characters")
ALL_OFF = dict.fromkeys(
    [*LINE_RULES, "top_2gram", "top_3gram", "top_4gram", *(f"duplicate_{n}grams" for n in range(5, 11))]
)
"""All repetition rules off, to test one at a time."""


@pytest.mark.parametrize("step", ["gopher_repetition", "gopher_quality"])
def test_plain_prose_passes(step: str) -> None:
    for kind in ("whitespace", "punctuation"):
        assert run(step, PROSE, words=kind) == PROSE


@pytest.mark.parametrize(("copies", "kept"), [(3, True), (4, False)])
def test_three_of_ten_lines_may_repeat(copies: int, kept: bool) -> None:
    text = "\n".join(lines(10 - copies) + lines(1) * copies)
    outcome = run("gopher_repetition", text, **ALL_OFF | {"duplicate_lines": 0.3})
    assert outcome == (text if kept else "-- duplicate lines")


@pytest.mark.parametrize(("copies", "kept"), [(3, True), (4, False)])
def test_three_of_ten_paragraphs_may_repeat(copies: int, kept: bool) -> None:
    text = "\n\n\n".join(lines(10 - copies) + lines(1) * copies)
    outcome = run("gopher_repetition", text, **ALL_OFF | {"duplicate_paragraphs": 0.3})
    assert outcome == (text if kept else "-- duplicate paragraphs")


@pytest.mark.parametrize(
    ("rule", "reason", "joint"),
    [
        ("duplicate_line_characters", "characters in duplicate lines", "\n"),
        ("duplicate_paragraph_characters", "characters in duplicate paragraphs", "\n\n"),
    ],
)
def test_a_fifth_of_the_characters_may_be_in_repeated_lines(rule: str, reason: str, joint: str) -> None:
    repeated, other = words(10), words(70, start=100)
    text = joint.join([repeated, repeated, other])
    fraction = len(repeated) / len(text)
    assert run("gopher_repetition", text, **ALL_OFF | {rule: fraction}) == text
    assert run("gopher_repetition", text, **ALL_OFF | {rule: fraction - 1e-9}) == f"-- {reason}"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_fraction_of_the_most_frequent_ngram_includes_spaces(n: int) -> None:
    gram = words(n)
    text = " ".join(f"{gram} {words(5, start=100 + 10 * i)}" for i in range(7))
    fraction = 7 * len(gram) / len(text)
    rule = {f"top_{n}gram": fraction}
    assert run("gopher_repetition", text, words="whitespace", **ALL_OFF | rule) == text
    rule = {f"top_{n}gram": fraction - 1e-9}
    assert run("gopher_repetition", text, words="whitespace", **ALL_OFF | rule) == f"-- top {n}-gram"


@pytest.mark.parametrize("n", range(5, 11))
def test_the_fraction_of_repeated_ngrams_excludes_spaces_and_the_first_occurrence(n: int) -> None:
    gram = words(n)
    text = " ".join(f"{gram} {words(20, start=100 + 30 * i)}" for i in range(4))
    fraction = 3 * 5 * n / len(text)
    rule = f"duplicate_{n}grams"
    assert run("gopher_repetition", text, words="whitespace", **ALL_OFF | {rule: fraction}) == text
    assert (
        run("gopher_repetition", text, words="whitespace", **ALL_OFF | {rule: fraction - 1e-9})
        == f"-- duplicate {n}-grams"
    )


def test_repeated_ngrams_do_not_overlap() -> None:
    text = " ".join(["abcde"] * 15)  # the first 5-gram, a repeated one from the second word, and one more: 50 of 89
    assert run("gopher_repetition", text, words="whitespace", **ALL_OFF | {"duplicate_5grams": 50 / 89}) == text
    assert "5-grams" in run("gopher_repetition", text, words="whitespace", **ALL_OFF | {"duplicate_5grams": 0.56})


def quality(text: str, **rule: object) -> str:
    sizes = ("min_words", "max_words", "min_word_length", "max_word_length")
    symbols = ("max_hashes", "max_ellipses", "max_bullet_lines", "max_ellipsis_lines")
    off = dict.fromkeys([*sizes, *symbols, "min_letter_words", "min_stop_words"])
    return run("gopher_quality", text, words="whitespace", **off | rule)


def test_min_and_max_words_do_not_count_punctuation_and_symbols() -> None:
    assert quality(words(50), min_words=50) == words(50)
    assert quality(words(49) + " -- $ ¿ ...", min_words=50) == "-- too few words"
    assert quality(words(51), max_words=50) == "-- too many words"
    assert quality(words(50) + " --", max_words=50) == words(50) + " --"


def test_the_mean_word_length_must_be_between_three_and_ten() -> None:
    assert quality("abc abc", min_word_length=3) == "abc abc"
    assert quality("abc ab", min_word_length=3) == "-- words too short"
    assert quality("abcdefghij " * 2, max_word_length=10) == "abcdefghij " * 2
    assert quality("abcdefghij abcdefghijk", max_word_length=10) == "-- words too long"


def test_one_hash_or_ellipsis_per_ten_words_is_allowed() -> None:
    for symbol, rule, reason in (
        ("#", "max_hashes", "hashes"),
        ("...", "max_ellipses", "ellipses"),
        ("…", "max_ellipses", "ellipses"),
    ):
        assert quality(words(10) + symbol, **{rule: 0.1}) == words(10) + symbol
        assert quality(words(9) + symbol, **{rule: 0.1}) == f"-- too many {reason}"


def test_nine_of_ten_lines_may_start_with_a_bullet() -> None:
    for bullet in ("-", "•"):
        some = "\n".join([f"  {bullet} {words(3)}"] * 9 + [words(3)])
        assert quality(some, max_bullet_lines=0.9) == some
        assert quality("\n".join([f"{bullet} {words(3)}"] * 10), max_bullet_lines=0.9) == "-- too many bullets"


def test_three_of_ten_lines_may_end_in_an_ellipsis() -> None:
    for dots in ("...", "… "):
        some = "\n".join([words(3) + dots] * 3 + [words(3)] * 7)
        assert quality(some, max_ellipsis_lines=0.3) == some
        more = "\n".join([words(3) + dots] * 4 + [words(3)] * 6)
        assert quality(more, max_ellipsis_lines=0.3) == "-- too many lines end in an ellipsis"


def test_eight_of_ten_words_must_have_a_letter() -> None:
    assert quality(words(8) + " 12 34", min_letter_words=0.8) == words(8) + " 12 34"
    assert quality(words(7) + " 12 34 56", min_letter_words=0.8) == "-- too few words with letters"


def test_two_different_stop_words_are_needed() -> None:
    assert quality("the mill of stone", min_stop_words=2) == "the mill of stone"
    assert quality("the mill the wheel The", min_stop_words=2) == "-- too few stop words"
    assert quality("der und das", min_stop_words=2, stop_words=["der", "das"]) == "der und das"


def test_a_text_without_words_is_dropped() -> None:
    assert run("gopher_quality", " \n ") == "-- too few words"
