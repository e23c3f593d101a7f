"""Choice of the tokenization engine: a fast engine is used only if it gives the ids of the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.config.corpus import TokenizerSection
from data_prep.tokenizer import engine_choice, engines
from data_prep.tokenizer.adversarial_texts import ADVERSARIAL_TEXTS, random_texts
from data_prep.tokenizer.engines import TokenizerEngine, Tokens, open_engine
from data_prep.tokenizer.train import train
from foundation.errors import ConfigError, DataError

TEXTS = [f"Document {i} of the mill: la rivière n° {i * i} turns the wheel.\n" for i in range(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "tokenizer"
    folder.mkdir()
    train(TEXTS, folder, TokenizerSection(train="bpe", vocab_size=400))
    return folder


class WrongEngine:
    name = "fastokens"

    def __init__(self, folder: Path, *, parse_special_tokens: bool, word: str) -> None:
        self._reference = engines.TokenizersEngine(folder, parse_special_tokens=parse_special_tokens)
        self._word = word

    def encode(self, texts: list[str]) -> Tokens:
        return self._reference.encode([text.replace(self._word, self._word.upper()) for text in texts])


@pytest.fixture
def make_fastokens_wrong(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces fastokens by an engine that encodes one word as if it were in upper case."""

    def replace(word: str) -> None:
        monkeypatch.setitem(engines._ENGINES, "fastokens", partial(WrongEngine, word=word))
        monkeypatch.setattr(engines, "_OPENED", {})

    return replace


def test_a_fast_engine_that_gives_the_references_ids_is_chosen(folder: Path) -> None:
    choice = engine_choice.choose_engine("auto", folder, parse_special_tokens=False, sample=TEXTS)
    assert (choice.engine, choice.rejected) == ("fastokens", ())
    ours, theirs = (open_engine(name, folder, parse_special_tokens=False) for name in ("fastokens", "tokenizers"))
    texts = [*ADVERSARIAL_TEXTS, *random_texts(), *TEXTS, "", "\x00", "a<|endoftext|>b"]
    for fast, slow in zip(ids_and_offsets(ours.encode(texts)), ids_and_offsets(theirs.encode(texts)), strict=True):
        assert np.array_equal(fast, slow)


def ids_and_offsets(tokens: Tokens) -> tuple[Any, Any]:
    return tokens.ids, tokens.offsets


def test_an_engine_that_differs_is_replaced(folder: Path, make_fastokens_wrong: Callable[[str], None]) -> None:
    make_fastokens_wrong("rivière")  # in no adversarial text
    assert engine_choice.choose_engine("auto", folder, parse_special_tokens=False, sample=[]).engine == "fastokens"
    choice = engine_choice.choose_engine("auto", folder, parse_special_tokens=False, sample=TEXTS[:3])
    assert choice.engine != "fastokens"
    assert choice.rejected[0][0] == "fastokens"
    assert "gives other ids than tokenizers for 'Document 0" in choice.rejected[0][1]
    with pytest.raises(ConfigError, match="gives other ids") as refused:
        engine_choice.choose_engine("fastokens", folder, parse_special_tokens=False, sample=TEXTS[:3])
    assert "tokenizers" in str(refused.value)


def test_an_engine_that_differs_later_ends_the_job(folder: Path, make_fastokens_wrong: Callable[[str], None]) -> None:
    make_fastokens_wrong("wheel")
    engine = open_engine("fastokens", folder, parse_special_tokens=False)
    engine_choice.check_sample(engine, folder, ["nothing of the sort"], parse_special_tokens=False, where="map task 3")
    with pytest.raises(DataError, match="map task 3: fastokens and tokenizers give different ids for 'the wheel'"):
        engine_choice.check_sample(
            engine, folder, ["fine", "the wheel"], parse_special_tokens=False, where="map task 3"
        )


def test_an_engine_without_the_tokenizer_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_folder: Path, *, parse_special_tokens: bool) -> TokenizerEngine:
        raise RuntimeError(f"no such pre-tokenizer\nspecial is {parse_special_tokens}")

    monkeypatch.setitem(engines._ENGINES, "fastokens", unsupported)
    monkeypatch.setattr(engines, "_OPENED", {})
    choice = engine_choice.choose_engine("auto", folder, parse_special_tokens=False, sample=[])
    assert choice.rejected[0] == ("fastokens", "no such pre-tokenizer")
    assert engine_choice.choose_engine(
        "tokenizers", folder, parse_special_tokens=False, sample=[]
    ) == engine_choice.ChosenEngine("tokenizers", ())


def test_engines_are_cached_by_the_tokenizers_content_not_by_its_path(folder: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    content = json.loads((folder / "tokenizer.json").read_text())
    (here / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    engine = open_engine("fastokens", folder, parse_special_tokens=False)
    assert open_engine("fastokens", here, parse_special_tokens=False) is engine
    assert open_engine("fastokens", here, parse_special_tokens=True) is not engine
    content["model"]["merges"] = content["model"]["merges"][:-50]
    (here / "tokenizer.json").write_text(json.dumps(content))
    other = open_engine("fastokens", here, parse_special_tokens=False)
    assert len(other.encode(TEXTS).ids) > len(engine.encode(TEXTS).ids)
