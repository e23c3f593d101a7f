"""A line of DNA, base64 or blanks takes time in proportion to its length, in training and in encoding, and is named."""

from __future__ import annotations

import io
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from data_prep.config.corpus import TokenizerSection
from data_prep.tokenizer import long_words, sentencepiece_model
from data_prep.tokenizer.load import load
from data_prep.tokenizer.long_words import NAMED_CHARACTERS, TRAINED_CHARACTERS, cut_long_words, longest_word
from data_prep.tokenizer.train import train
from foundation.directory import read_manifest
from foundation.errors import ConfigError
from tests.data_prep.conftest import cli, write_config
from tests.data_prep.in_process import run_job

TEXTS = [f"Document {i} of the mill: la rivière n° {i * i} turns the wheel.\n" for i in range(100)]
WITHIN_S = 20.0
"""Of CPU time. What was in the square of the length took minutes; what is linear takes about a second."""


def dna(characters: int) -> str:
    return "".join(random.Random(0).choices("acgt", k=characters))


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece-bpe", "sentencepiece-unigram"])
def test_a_tokenizer_is_trained_on_a_word_of_a_million_letters_in_linear_time(kind: Any, tmp_path: Path) -> None:
    began = time.process_time()
    train([*TEXTS, dna(1_000_000)], tmp_path, TokenizerSection(train=kind, vocab_size=500))
    assert time.process_time() - began < WITHIN_S
    assert len(load(tmp_path).encode(dna(3000)).ids) < 2000  # it has learnt from it


def test_words_up_to_the_bound_are_trained_on_as_they_are() -> None:
    texts = [*TEXTS, "ab" * (TRAINED_CHARACTERS // 2), " " * TRAINED_CHARACTERS]
    assert list(cut_long_words(texts)) == texts


def test_of_a_word_over_the_limit_the_rest_is_left_out_and_what_follows_it_is_not() -> None:
    word = "ab" * TRAINED_CHARACTERS
    pieces = list(cut_long_words([f"a {word * 3} b {word} c"], longest=5000))
    assert "".join(pieces) == f"a {(word * 3)[:5000]} b {word} c"


def test_more_characters_than_ids_are_refused_with_a_vocabulary_that_is_enough(tmp_path: Path) -> None:
    texts = [*TEXTS, *("".join(chr(0x4E00 + i) for i in range(at, at + 50)) for at in range(0, 500, 50))]
    with pytest.raises(ConfigError) as refused:
        train(texts, tmp_path, TokenizerSection(train="sentencepiece-unigram", vocab_size=400))
    enough = re.search(r"try: (\d+) or more", str(refused.value))
    assert enough is not None, refused.value
    train(texts, tmp_path, TokenizerSection(train="sentencepiece-unigram", vocab_size=int(enough[1])))


@given(text=st.text(st.sampled_from("ab \n"), max_size=60))
def test_cut_texts_are_the_text_and_have_no_longer_words(text: str) -> None:
    limit = 4
    whole, pattern = long_words.TRAINED_CHARACTERS, long_words._TRAINED
    try:
        long_words.TRAINED_CHARACTERS, long_words._TRAINED = limit, long_words._longer_than(limit)
        pieces = list(cut_long_words([text]))
    finally:
        long_words.TRAINED_CHARACTERS, long_words._TRAINED = whole, pattern
    assert "".join(pieces) == text
    assert all(len(word) <= limit for piece in pieces for word in piece.split())


def test_a_run_of_blanks_is_normalized_in_linear_time() -> None:
    """Most sentencepiece models remove blanks at the end of a text, and merge those within it."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=written, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    converted = sentencepiece_model.convert(written.getvalue())
    processor = sentencepiece_model.open_processor(written.getvalue())
    began = time.process_time()
    for text in (f"a{' ' * 500_000}b", f"a{' ' * 500_000}", f"{' ' * 500_000}b"):
        assert converted.encode(text, add_special_tokens=False).ids == processor.encode(text)
    assert time.process_time() - began < WITHIN_S


def test_the_longest_word_is_counted_in_characters_from_the_bound_on() -> None:
    assert longest_word("a" * NAMED_CHARACTERS) == NAMED_CHARACTERS
    assert longest_word("a" * (NAMED_CHARACTERS - 1) + " " + "b") == 0
    assert longest_word("x" + " " * (NAMED_CHARACTERS + 1) + "é" * (NAMED_CHARACTERS + 2)) == NAMED_CHARACTERS + 2


def test_the_statistics_name_documents_with_very_long_words(work: Path) -> None:
    rows = [*TEXTS, dna(60_000), "short", f"{dna(70_000)} and more"]
    (work / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    tokenizer = {"train": "bpe", "vocab_size": 300, "sample_bytes": 2000}
    run_job(write_config(sources=[{"name": "web", "path": "a.jsonl"}], tokenizer=tokenizer, task_bytes=70_000))
    assert read_manifest(work / "tokens", kind="tokens").details["long_words"] == [
        {"characters": 70_000, "source": "web", "file": "a.jsonl", "line": 103},
        {"characters": 60_000, "source": "web", "file": "a.jsonl", "line": 101},
    ]
    assert "70,000  web: a.jsonl:103" in cli("stats", "tokens").stdout


def test_the_plan_names_them(work: Path) -> None:
    rows = [dna(60_000), *(f"{text} {i}" for i in range(800) for text in TEXTS[:50])]
    (work / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    config = write_config(sources=[{"name": "web", "path": "a.jsonl"}])
    assert "60,000  web: a.jsonl:1" in cli("plan", "--config", config).stdout
