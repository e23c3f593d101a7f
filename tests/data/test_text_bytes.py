"""The bytes of text that ids stand for: what data prep counted while it still had the text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.formats.tokenfile import TokenFile, TokenFileWriter
from data_prep.tokenizer.text_bytes import text_bytes
from foundation.directory import read_manifest
from foundation.errors import DataError
from foundation.section import parse
from pipeline.config.sections.data import DataSection
from pipeline.data.mixture import open_heldout, open_mixture
from tests.conftest import make_tokens

TEXTS = ["Wasser, Mühle — 水車 🌊\n\n\tturns <|endoftext|> <0x41>\u00a0!", "x", "def f(a):\n    return a\n" * 5]


@pytest.fixture(scope="module", params=["bpe", "sentencepiece-unigram", "sentencepiece-bpe"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of texts with bytes that are in no vocabulary, by each kind of tokenizer."""
    work = tmp_path_factory.mktemp("bytes")
    (work / "text").mkdir()
    for i in range(60):
        (work / "text" / f"{i}.txt").write_text(f"{i} " + TEXTS[i % 3] + " the mill wheel turns in the water" * (i % 7))
    return make_tokens(work, [work / "text"], tokenizer={"train": request.param, "vocab_size": 400})


def test_text_bytes_equal_those_counted_by_data_prep(made: Path) -> None:
    splits = read_manifest(made, kind="tokens").details["splits"]
    for split in ("train", "heldout"):
        for shard in splits[split]["shards"]:
            assert text_bytes(TokenFile.open(made / split / shard["name"]), made / "tokenizer") == shard["bytes"]


def test_a_megatron_dataset_may_be_evaluated_on_another_one(made: Path) -> None:
    source = {"path": str(made / "train/shard-00000"), "tokenizer": str(made / "tokenizer")}
    data = {"sources": [source | {"heldout": str(made / "heldout/shard-00000")}], "sequence_length": 16}
    section = parse(DataSection, data)
    (held,) = open_heldout(section, open_mixture(section, seed=1))
    entry = read_manifest(made, kind="tokens").details["splits"]["heldout"]
    assert (held.tokens, held.bytes) == (entry["tokens"], entry["bytes"])


@pytest.mark.parametrize("wrong", [400, 65_000, -1])
def test_an_id_outside_the_vocabulary_is_named_wherever_it_is(made: Path, tmp_path: Path, wrong: int) -> None:
    # between the ends that are looked at when a prefix is opened
    ids = np.full(200_000, 5, dtype=np.int32)
    ids[123_456] = wrong
    with TokenFileWriter(tmp_path / "web", dtype=np.int32) as writer:
        writer.append(ids)
    source = {"path": str(made / "train/shard-00000"), "tokenizer": str(made / "tokenizer")}
    data = {"sources": [source | {"heldout": str(tmp_path / "web")}], "sequence_length": 16}
    section = parse(DataSection, data)
    with pytest.raises(DataError) as refused:
        open_heldout(section, open_mixture(section, seed=1))
    known = read_manifest(made, kind="tokens").details["tokenizer"]["vocab_size"]
    assert f"web.bin holds the id {wrong} as token 123,456" in str(refused.value)
    assert f"{made / 'tokenizer'} has {known} ids\n  try: " in str(refused.value)


def test_a_tokenizer_without_countable_bytes_is_refused(made: Path, tmp_path: Path) -> None:
    text = (made / "tokenizer/tokenizer.json").read_text()
    start = text.index('"decoder"')
    end = text.index('"model"', start)
    (tmp_path / "tokenizer.json").write_text(text[:start] + '"decoder": null, ' + text[end:])
    with pytest.raises(DataError, match="but its decoder is none"):
        text_bytes(TokenFile.open(made / "train/shard-00000"), tmp_path)
