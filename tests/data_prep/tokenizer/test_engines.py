"""A fast engine is used where it gives the reference's ids, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.config.corpus import TokenizerSection
from data_prep.tokenizer import engines, proof
from data_prep.tokenizer.engines import Engine, Tokens, open_engine
from data_prep.tokenizer.probes import PROBES
from data_prep.tokenizer.train import train
from headrace.base.errors import ConfigError, DataError

TEXTS = [f"Document {i} of the mill: la rivière n° {i * i} turns the wheel.\n" for i in range(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "tokenizer"
    folder.mkdir()
    train(TEXTS, folder, TokenizerSection(train="bpe", vocab_size=400))
    return folder


class Wrong:
    """An engine that differs on one word."""

    name = "fastokens"

    def __init__(self, folder: Path, *, special: bool, word: str) -> None:
        self._reference = engines.Reference(folder, special=special)
        self._word = word

    def encode(self, texts: list[str]) -> Tokens:
        return self._reference.encode([text.replace(self._word, self._word.upper()) for text in texts])


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes fastokens an engine that takes a word for another, in capitals."""

    def made(word: str) -> None:
        maker = lambda folder, *, special: Wrong(folder, special=special, word=word)  # noqa: E731
        monkeypatch.setitem(engines._MAKERS, "fastokens", maker)
        monkeypatch.setattr(engines, "_OPENED", {})

    return made


def test_the_fast_engine_gives_the_references_ids_and_is_taken(folder: Path) -> None:
    choice = proof.choose("auto", folder, special=False, sample=TEXTS)
    assert (choice.engine, choice.refused) == ("fastokens", ())
    ours, theirs = (open_engine(name, folder, special=False) for name in ("fastokens", "tokenizers"))
    texts = [*PROBES, *proof.fuzz(), *TEXTS, "", "\x00", "a<|endoftext|>b"]
    for fast, slow in zip(vars_of(ours.encode(texts)), vars_of(theirs.encode(texts)), strict=True):
        assert np.array_equal(fast, slow)


def vars_of(tokens: Tokens) -> tuple[Any, Any]:
    return tokens.ids, tokens.offsets


def test_an_engine_that_differs_on_the_corpus_is_replaced(folder: Path, wrong: Callable[[str], None]) -> None:
    wrong("rivière")  # in no probe
    assert proof.choose("auto", folder, special=False, sample=[]).engine == "fastokens"
    choice = proof.choose("auto", folder, special=False, sample=TEXTS[:3])
    assert choice.engine != "fastokens"
    assert choice.refused[0][0] == "fastokens"
    assert "gives other ids than tokenizers for 'Document 0" in choice.refused[0][1]
    with pytest.raises(ConfigError, match="gives other ids") as refused:
        proof.choose("fastokens", folder, special=False, sample=TEXTS[:3])
    assert "tokenizers" in str(refused.value)


def test_an_engine_that_differs_in_a_task_ends_the_job(folder: Path, wrong: Callable[[str], None]) -> None:
    wrong("wheel")
    engine = open_engine("fastokens", folder, special=False)
    proof.check_sample(engine, folder, ["nothing of the sort"], special=False, where="map task 3")
    with pytest.raises(DataError, match="map task 3: fastokens and tokenizers give different ids for 'the wheel'"):
        proof.check_sample(engine, folder, ["fine", "the wheel"], special=False, where="map task 3")


def test_an_engine_that_refuses_the_tokenizer_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_folder: Path, *, special: bool) -> Engine:
        raise RuntimeError(f"no such pre-tokenizer\nspecial is {special}")

    monkeypatch.setitem(engines._MAKERS, "fastokens", refuses)
    monkeypatch.setattr(engines, "_OPENED", {})
    choice = proof.choose("auto", folder, special=False, sample=[])
    assert choice.refused[0] == ("fastokens", "no such pre-tokenizer")
    assert proof.choose("tokenizers", folder, special=False, sample=[]) == proof.Choice("tokenizers", ())


def test_a_tokenizer_is_known_by_its_content_not_by_its_place(folder: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    content = json.loads((folder / "tokenizer.json").read_text())
    (here / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    engine = open_engine("fastokens", folder, special=False)
    assert open_engine("fastokens", here, special=False) is engine
    assert open_engine("fastokens", here, special=True) is not engine
    content["model"]["merges"] = content["model"]["merges"][:-50]
    (here / "tokenizer.json").write_text(json.dumps(content))
    other = open_engine("fastokens", here, special=False)
    assert len(other.encode(TEXTS).ids) > len(engine.encode(TEXTS).ids)
