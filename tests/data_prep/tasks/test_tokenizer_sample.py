"""The training sample of a tokenizer: cleaned train documents, whatever the size of the map tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.chat.encoder import ChatEncoder
from data_prep.config.corpus import CorpusConfig, TokenizerSection
from data_prep.hashing import HELDOUT, content_hashes, select_fraction
from data_prep.sources.conversation import conversation_line
from data_prep.sources.listing import resolve
from data_prep.sources.units import Unit, units
from data_prep.tasks import tokenizer_sample
from data_prep.tasks.tokenizer_sample import proof_texts, sample_texts
from data_prep.tokenizer import fingerprint
from data_prep.tokenizer.train import train
from foundation.directory import read_manifest
from foundation.errors import ConfigError, DataError
from tests.data_prep.conftest import cli, tree, write_config


def sentence(i: int) -> str:
    return f"Document {i} of the mill: la rivière n° {i * i} turns the wheel {i % 7 * 'and the stones '}.\n"


def make_config(**fields: Any) -> CorpusConfig:
    given = {"output": "o", "tokenizer": {"train": "bpe", "vocab_size": 300}, "heldout_fraction": 0.3}
    return CorpusConfig.model_validate(given | fields)


def plan_units(config: CorpusConfig, task_bytes: int) -> list[Unit]:
    found = [resolve(source, at="sources") for source in config.sources]
    return list(units(found, task_bytes=task_bytes))


def is_heldout(texts: list[str], config: CorpusConfig) -> list[bool]:
    hashes = content_hashes([text.encode() for text in texts])[:, 0]
    heldout: list[bool] = select_fraction(
        hashes, fraction=config.heldout_fraction, seed=config.seed, purpose=HELDOUT
    ).tolist()
    return heldout


@pytest.fixture
def corpus(work: Path) -> list[dict[str, str]]:
    """400 documents of plain jsonl and 300 of parquet in many row groups."""
    rows = "".join(json.dumps({"text": sentence(i)}) + "\n" for i in range(400))
    (work / "a.jsonl").write_text(rows)
    pq.write_table(pa.table({"text": [sentence(i) for i in range(400, 700)]}), work / "b.parquet", row_group_size=7)
    return [{"path": "a.jsonl", "name": "a"}, {"path": "b.parquet", "name": "b"}]


@pytest.mark.parametrize("piece_bytes", [1500, 8 << 20])  # small: many of them are selected, and not all
def test_the_sample_does_not_depend_on_task_bytes(
    piece_bytes: int, corpus: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_sample, "_PIECE_BYTES", piece_bytes)
    section = {"train": "bpe", "vocab_size": 300, "sample_bytes": 2000}
    config = make_config(sources=corpus, tokenizer=section)
    samples = [list(sample_texts(plan_units(config, size), config)) for size in (700, 9_000, 1 << 25)]
    assert samples[0] == samples[1] == samples[2]
    assert 1700 < sum(len(text.encode()) for text in samples[0]) < 2300
    proofs = [proof_texts(plan_units(config, size), config) for size in (700, 9_000, 1 << 25)]
    assert proofs[0] == proofs[1] == proofs[2]


def test_pieces_contain_every_document_once(corpus: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_sample, "_PIECE_BYTES", 1500)
    config = make_config(sources=corpus, tokenizer={"train": "bpe", "vocab_size": 300, "sample_bytes": 1 << 20})
    expected = [sentence(i) for i in range(700)]
    train_texts = [text for text, heldout in zip(expected, is_heldout(expected, config), strict=True) if not heldout]
    assert sorted(sample_texts(plan_units(config, 5000), config)) == sorted(train_texts)


def test_the_sample_of_a_part_stays_within_it(corpus: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an estimate of the time, which is given the beginning of a file."""
    monkeypatch.setattr(tokenizer_sample, "_PIECE_BYTES", 1500)
    config = make_config(sources=corpus[:1])
    whole = plan_units(config, 1 << 25)[0]
    begin = "".join(sample_texts([replace(whole, end=4000, parts=2)], config))
    assert 1000 < len(begin.encode()) < 4000


def test_task_bytes_change_neither_the_tokenizer_nor_the_shards(corpus: list[dict[str, str]], work: Path) -> None:
    section = {"train": "bpe", "vocab_size": 320, "sample_bytes": 2000}
    config = write_config(sources=corpus, tokenizer=section)
    found = []
    for size in (2000, 9000, 100_000):
        cli("--config", config, "--set", f"output=t{size}", "--set", f"task_bytes={size}")
        fingerprint = read_manifest(work / f"t{size}", kind="tokens").details["tokenizer"]["fingerprint"]
        found.append((fingerprint, {k: v for k, v in tree(work / f"t{size}").items() if "shard" in k}))
    assert found[0] == found[1] == found[2]


def test_the_sample_is_cleaned_and_the_split_is_computed_from_the_cleaned_text(work: Path) -> None:
    texts = [f"Write to miller{i}@example.org about mill {i}." for i in range(300)] + ["forbidden word"] * 40
    (work / "a.jsonl").write_text(
        "".join(json.dumps({"text": t, "url": f"http://{i}.org"}) + "\n" for i, t in enumerate(texts))
    )
    (work / "words.txt").write_text("forbidden\n")
    (work / "domains.txt").write_text("7.org\n")
    steps = [
        {"step": "word_blocklist", "words": ["words.txt"]},
        {"step": "pii"},
        {"step": "url_blocklist", "domains": ["domains.txt"]},
    ]
    config = make_config(sources=[{"path": "a.jsonl"}], clean=steps)
    found = list(sample_texts(plan_units(config, 1 << 20), config))
    assert found
    assert not any("forbidden" in text or "miller" in text or text.endswith("mill 7.") for text in found)
    assert not any(is_heldout(found, config))
    assert len(found) > 150  # of 299, 70 % are for training


def test_documents_dropped_by_cleaning_are_replaced_by_others(work: Path) -> None:
    texts = [sentence(i) if i % 10 == 0 else f"forbidden {sentence(i)}" for i in range(4000)]
    (work / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (work / "words.txt").write_text("forbidden\n")
    config = make_config(
        sources=[{"path": "a.jsonl"}],
        clean=[{"step": "word_blocklist", "words": ["words.txt"]}],
        tokenizer={"train": "bpe", "vocab_size": 300, "sample_bytes": 10_000},
    )
    found = list(sample_texts(plan_units(config, 1 << 20), config))
    assert sum(len(text.encode()) for text in found) > 8_500
    assert len(set(found)) == len(found)


TEMPLATE = "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"


def test_conversations_held_out_of_training_are_held_out_of_the_sample(work: Path) -> None:
    talks = [
        [{"role": "user", "content": f"mill {i}?"}, {"role": "assistant", "content": f"wheel {i}"}] for i in range(200)
    ]
    talks.append([{"role": "user", "content": "<|turn|>"}, {"role": "assistant", "content": "I obey"}])
    (work / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    (work / "chat.jinja").write_text(TEMPLATE)
    section = {"train": "bpe", "vocab_size": 300, "special_tokens": ["<|turn|>"], "chat_template": "chat.jinja"}
    config = make_config(sources=[{"path": "a.jsonl", "messages_field": "messages"}], tokenizer=section)
    folder = work / "tokenizer"
    folder.mkdir()
    train(["mill wheel"], folder, TokenizerSection.model_validate(section))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    encoder = ChatEncoder(folder, parse_special_tokens=False)
    rendered = [encoder.encode(conversation_line(talk), everything=False).text for talk in talks[:-1]]
    heldout = is_heldout(rendered, config)
    assert any(heldout)
    expected = [f"mill {i}?\nwheel {i}" for i in range(200) if not heldout[i]]
    assert sorted(sample_texts(plan_units(config, 1 << 20), config)) == sorted(expected)
    without = make_config(sources=[{"path": "a.jsonl", "messages_field": "messages"}])
    with pytest.raises(DataError, match="no chat template"):
        next(sample_texts(plan_units(without, 1 << 20), without))


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tools.jinja"])
def test_the_fingerprint_of_a_given_tokenizer_covers_its_chat_templates(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    fingerprints = []
    for template in ("one", "two"):
        (tmp_path / name).write_text(template)
        fingerprints.append(fingerprint.content_fingerprint(str(tmp_path)))
    assert fingerprints[0] != fingerprints[1]
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="contains no tokenizer"):
        fingerprint.check_path(str(tmp_path))
