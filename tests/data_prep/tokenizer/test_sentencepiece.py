"""A given sentencepiece model gives documents the ids of sentencepiece itself, whatever tokenizer.json can express."""

from __future__ import annotations

import io
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from data_prep.chat.encoder import ChatEncoder
from data_prep.formats.tokenfile import TokenFile, open_split
from data_prep.sources.conversation import conversation_line
from data_prep.tokenizer import existing, sentencepiece_model
from data_prep.tokenizer.adversarial_texts import ADVERSARIAL_TEXTS, normal_forms, random_texts
from data_prep.tokenizer.engine_choice import check_sample, choose_engine
from data_prep.tokenizer.engines import open_engine
from data_prep.tokenizer.load import load
from foundation.errors import ConfigError, DataError
from tests.data_prep.conftest import write_config
from tests.data_prep.in_process import run_job

TEXTS = [
    *["Tôi yêu tiếng Việt rất nhiều", "한국어 문장은 여기에 있습니다", "the mill turns the wheel, and a<sep>b<sep> c"]
    * 40,
    "aaaa bbbb abab cdcd abcd dcba acbd",
]
EXACT: dict[str, Any] = {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True}
MODELS: dict[str, dict[str, Any]] = {
    "character map": {},
    "character map, bpe": {"model_type": "bpe"},
    "user-defined symbols": EXACT | {"user_defined_symbols": ["<sep>"]},
    "equal scores": EXACT,
    "literal byte pieces": {"normalization_rule_name": "identity", "byte_fallback": True},
    "exact": EXACT,
}


def trained(name: str) -> bytes:
    written = io.BytesIO()
    fields = {"vocab_size": 420, "hard_vocab_limit": False, "minloglevel": 2} | MODELS[name]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=written, **fields)
    if name != "equal scores":
        return written.getvalue()
    proto = sentencepiece_model._parse(written.getvalue())
    for piece in proto.pieces:  # as of a merged vocabulary
        piece.score = 0.0 if len(piece.piece) < 5 else piece.score
    content: bytes = proto.SerializeToString()
    return content


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, work: Path) -> bytes:
    """A model of each kind, in the file m.model of the working directory."""
    content = trained(request.param)
    (work / "m.model").write_bytes(content)
    (work / "name").write_text(request.param)
    return content


def imported(work: Path, path: str = "m.model") -> Path:
    folder = work / "imported"
    folder.mkdir()
    existing.import_tokenizer(path, folder)
    return folder


def test_every_text_gets_the_ids_of_sentencepiece_whatever_the_model(model: bytes, work: Path) -> None:
    folder = imported(work)
    choice = choose_engine("auto", folder, parse_special_tokens=False, sample=TEXTS)
    assert (choice.engine == "sentencepiece") == ((work / "name").read_text() != "exact"), choice
    texts = [*ADVERSARIAL_TEXTS, *normal_forms(), *random_texts(), *TEXTS, *sentencepiece_model.texts_of_pieces(model)]
    found = open_engine(choice.engine, folder, parse_special_tokens=False).encode(texts)
    expected = sentencepiece.SentencePieceProcessor(model_proto=model).encode(texts)
    assert [part.tolist() for part in np.split(found.ids, found.offsets[1:-1])] == expected


@pytest.mark.parametrize("name", ["character map", "user-defined symbols", "equal scores"])
def test_an_engine_that_reads_tokenizer_json_is_refused_where_it_may_differ(name: str, work: Path) -> None:
    (work / "m.model").write_bytes(trained(name))
    folder = imported(work)
    with pytest.raises(ConfigError, match=r"normalizer|symbols|scores") as refused:
        choose_engine("tokenizers", folder, parse_special_tokens=False, sample=[])
    assert '"sentencepiece"' in str(refused.value)
    assert choose_engine("sentencepiece", folder, parse_special_tokens=False, sample=[]).engine == "sentencepiece"
    engine, letters = open_engine("tokenizers", folder, parse_special_tokens=False), random.Random(0)
    words = ["".join(letters.choices("themilurnsw", k=9)) for _ in range(300)]
    with pytest.raises(DataError, match='"engine": "sentencepiece"'):
        check_sample(engine, folder, [*normal_forms(), *TEXTS, *words], parse_special_tokens=False, where="map task 3")


def test_shards_have_the_ids_of_sentencepiece_and_so_have_those_of_a_job_with_their_tokenizer(work: Path) -> None:
    model = trained("character map")
    (work / "m.model").write_bytes(model)
    texts = [f"{i} {unicodedata.normalize('NFD', text)}" for i, text in enumerate(TEXTS)]
    (work / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for output, tokenizer in (("tokens", "m.model"), ("again", "tokens/tokenizer")):
        run_job(write_config(output=output, sources=[{"path": "a.jsonl"}], tokenizer={"path": tokenizer}))
        prefixes, _ = open_split(work / output, split="train")
        file = TokenFile.open(prefixes[0])
        found = [part[:-1].tolist() for part in np.split(file.tokens, np.cumsum(file.sequence_lengths)[:-1])]
        encoded = sentencepiece.SentencePieceProcessor(model_proto=model).encode(texts)
        assert len(found) > 80
        assert all(ids in encoded for ids in found)
        assert (work / output / "tokenizer" / "tokenizer.model").read_bytes() == model


def test_a_folder_with_nothing_but_a_model_keeps_it_and_its_ids(work: Path) -> None:
    model = trained("character map, bpe")
    (work / "llama").mkdir()
    (work / "llama" / "tokenizer.model").write_bytes(model)
    names = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    (work / "llama" / "tokenizer_config.json").write_text(json.dumps(names))
    folder = imported(work, "llama")
    assert (folder / "tokenizer.model").read_bytes() == model
    choice = choose_engine("auto", folder, parse_special_tokens=False, sample=[])
    found = open_engine(choice.engine, folder, parse_special_tokens=False).encode(normal_forms())
    expected = sentencepiece.SentencePieceProcessor(model_proto=model).encode(normal_forms())
    assert [part.tolist() for part in np.split(found.ids, found.offsets[1:-1])] == expected


def test_a_folder_with_a_tokenizer_json_and_another_model_says_so(work: Path) -> None:
    (work / "m.model").write_bytes(trained("character map"))
    folder = imported(work)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"reference_ids": None}))
    (work / "again").mkdir()
    (line,) = existing.import_tokenizer(str(folder), work / "again")
    assert "give different ids" in line


def test_a_copy_that_has_lost_the_model_is_refused_until_either_remedy_is_taken(work: Path) -> None:
    """`save_pretrained` of transformers leaves the model out."""
    (work / "m.model").write_bytes(trained("character map"))
    folder = imported(work)
    (folder / "tokenizer.model").unlink()
    with pytest.raises(DataError, match=r"copy tokenizer\.model beside it, or remove reference_ids"):
        choose_engine("auto", folder, parse_special_tokens=False, sample=[])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["reference_ids"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert choose_engine("auto", folder, parse_special_tokens=False, sample=[]).engine == "tokenizers"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"reference_ids": "sentencepiece"}))
    (folder / "tokenizer.model").write_bytes((work / "m.model").read_bytes())
    assert choose_engine("auto", folder, parse_special_tokens=False, sample=[]).engine == "sentencepiece"


def test_conversations_get_the_ids_of_sentencepiece_between_special_tokens(work: Path) -> None:
    model = trained("character map")
    (work / "m.model").write_bytes(model)
    folder = imported(work)
    template = (
        "{% for m in messages %}<s>{{ m.role }} {% generation %}{{ m.content }}</s>{% endgeneration %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    answer = unicodedata.normalize("NFD", TEXTS[1])
    line = conversation_line([{"role": "assistant", "content": answer}])
    found = ChatEncoder(folder, parse_special_tokens=False).encode(line, everything=False)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    head = processor.encode("assistant ")
    whole = processor.encode(f"assistant {answer}")
    assert found.ids.tolist() == [processor.bos_id(), *whole, processor.eos_id()]
    learnt = found.ids[found.mask == 1].tolist()
    assert learnt[-1] == processor.eos_id()
    assert len(learnt) - 1 == len(whole) - len(head) - 1  # the blank before the answer is a token of its own
    special = open_engine("sentencepiece", folder, parse_special_tokens=True).encode(["<s>a</s>"]).ids.tolist()
    assert special == [processor.bos_id(), *processor.encode("a"), processor.eos_id()]
    assert load(folder).token_to_id("<s>") == processor.bos_id()
