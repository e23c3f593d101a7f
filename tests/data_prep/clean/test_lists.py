"""Blocklists and decontamination, which read files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from tests.data_prep.clean.one_step import PROSE, run


def write_list(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["# a comment", "", *lines]) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.com/a", "blocked domain"),
        ("http://deep.sub.Example.COM:8080/", "blocked domain"),
        ("example.com", "blocked domain"),
        ("https://notexample.com/", None),
        ("https://fine.org/page", "blocked URL"),
        ("http://fine.org/page/#part", "blocked URL"),
        ("https://fine.org/other", None),
        ("https://fine.org/casino-night", "blocked word in URL"),
        ("https://fine.org/casinos", None),
        ("http://[broken", None),
        (None, None),
    ],
)
def test_urls_are_blocked_by_domain_url_and_word(tmp_path: Path, url: str | None, reason: str | None) -> None:
    keys = {
        "domains": [write_list(tmp_path / "d", "example.com")],
        "urls": [write_list(tmp_path / "u", "fine.org/page")],
        "words": [write_list(tmp_path / "w", "Casino")],
    }
    outcome = run("url_blocklist", "text", record={"url": url}, **keys)
    assert outcome == (f"-- {reason}" if reason else "text")


def test_texts_without_url_may_be_dropped(tmp_path: Path) -> None:
    keys = {"domains": [write_list(tmp_path / "d", "example.com")], "field": "source", "missing": "drop"}
    assert run("url_blocklist", "text", record={"url": "https://x.org"}, **keys) == "-- no URL"
    assert run("url_blocklist", "text", record={"source": "https://x.org"}, **keys) == "text"


@pytest.mark.parametrize(
    ("text", "blocked"),
    [
        ("What a Darn thing", True),
        ("(darn)", True),
        ("darning", False),
        ("so very\n bad it is", True),
        ("so very, bad", False),
        ("a$$ here", True),
        ("ba$$", False),
        ("one *** two", True),
        ("ÉTÉ", True),
    ],
)
def test_words_are_blocked_only_as_whole_words(tmp_path: Path, text: str, blocked: bool) -> None:
    path = write_list(tmp_path / "w", "darn", "very bad", "a$$", "***", "été")
    assert run("word_blocklist", text, words=[path]) == ("-- blocked word" if blocked else text)


def test_substrings_are_blocked_in_languages_without_spaces(tmp_path: Path) -> None:
    path = write_list(tmp_path / "w", "水車")
    assert run("word_blocklist", "古い水車小屋", words=[path]) == "古い水車小屋"
    assert run("word_blocklist", "古い水車小屋", words=[path], match="substrings") == "-- blocked word"


QUESTION = "Which of these wheels turns fastest when the gate of the headrace is opened wide?"  # 15 words


def test_texts_that_share_a_13_gram_with_evaluation_data_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"question": QUESTION, "choices": ["undershot", {"b": PROSE}]}) + "\n", encoding="utf-8")
    words = QUESTION.upper().rstrip("?").split()
    for count, kept in ((12, True), (13, False)):
        text = "Before -- " + ", ".join(words[:count]) + "; after."
        outcome = run("decontaminate", text, evaluations=[str(path)])
        assert outcome == (text if kept else "-- in evaluation data")
    assert run("decontaminate", PROSE, evaluations=[str(path)]) == "-- in evaluation data"
    assert run("decontaminate", PROSE, evaluations=[str(path)], fields=["question"]) == PROSE


def test_evaluations_may_be_plain_or_compressed_text(tmp_path: Path) -> None:
    path = tmp_path / "eval.txt.gz"
    path.write_bytes(gzip.compress(QUESTION.replace(" ", "\n").encode()))
    assert run("decontaminate", QUESTION, evaluations=[str(path)]) == "-- in evaluation data"


def test_the_ngram_size_can_be_set(tmp_path: Path) -> None:
    path = write_list(tmp_path / "eval.txt", QUESTION)
    assert run("decontaminate", "which OF these: wheels", evaluations=[path], ngram=4) == "-- in evaluation data"
    assert run("decontaminate", QUESTION[:-6], evaluations=[path], ngram=15) == QUESTION[:-6]


@pytest.mark.parametrize(
    ("step", "keys", "message"),
    [
        ("word_blocklist", {"words": ["absent.txt"]}, "No such file"),
        ("word_blocklist", {"words": ["empty.txt"]}, "the list has no entries"),
        ("url_blocklist", {}, "the step has no blocklist"),
        ("decontaminate", {"evaluations": ["bad.jsonl"]}, r"bad\.jsonl:2.*\n.*not JSON"),
        ("decontaminate", {"evaluations": ["good.jsonl"], "fields": ["answer"]}, "no field 'answer'"),
        ("decontaminate", {"evaluations": ["good.jsonl"]}, "has 13 words"),
    ],
)
def test_unusable_lists_are_refused_when_the_chain_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, keys: dict[str, object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_list(tmp_path / "empty.txt")
    (tmp_path / "bad.jsonl").write_text('{"a": "b"}\n{"a": \n')
    (tmp_path / "good.jsonl").write_text('{"a": "too short"}\n')
    with pytest.raises(ConfigError, match=message):
        run(step, "text", **keys)
