"""Shards, AutoTokenizer and the manifest use the same tokenizer; training and import of tokenizers are
deterministic."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from data_prep.chat.encoder import template_tokens
from data_prep.config.corpus import TokenizerSection
from data_prep.config.text_policy import TextPolicy
from data_prep.formats.tokenfile import TokenFile, shard_prefix
from data_prep.tokenizer import existing, fingerprint, sentencepiece_model
from data_prep.tokenizer.adversarial_texts import ADVERSARIAL_TEXTS
from data_prep.tokenizer.fingerprint import tokenizer_fingerprint
from data_prep.tokenizer.load import check_usable, describe, load, read_config
from data_prep.tokenizer.train import train, write_folder
from foundation.errors import ConfigError, DataError
from tests import warm
from tests.data_prep.conftest import cli, write_config

KINDS = ("bpe", "sentencepiece-unigram", "sentencepiece-bpe")
TEXTS = [f"def mill_{i}(wheel, water):\n    return wheel * {i} + water  # la roue n° {i}\n" * 3 for i in range(200)]


def trained(folder: Path, kind: str, **fields: Any) -> Path:
    folder.mkdir(parents=True)
    train(TEXTS, folder, TokenizerSection.model_validate({"train": kind, "vocab_size": 400} | fields))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("tokenizers") / request.param, request.param)


def ids(folder: Path, text: str) -> list[int]:
    found: list[int] = load(folder).encode(text, add_special_tokens=False).ids
    return found


def auto(folder: Path) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def test_autotokenizer_gives_the_ids_of_the_shards(folder: Path) -> None:
    tokenizer = auto(folder)
    for text in (*ADVERSARIAL_TEXTS, *TEXTS[:3]):
        assert tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids(folder, text), (
            text
        )
        if "<|endoftext|>" not in text:  # in a prompt, it is parsed as the token
            assert tokenizer(text)["input_ids"] == ids(folder, text), text


def test_autotokenizer_gives_the_same_ids_beside_a_models_config_json(folder: Path, tmp_path: Path) -> None:
    """Some classes that transformers chooses by model type rebuild the tokenizer from its vocabulary."""
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    for text in ADVERSARIAL_TEXTS:
        found = auto(tmp_path / "model")(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert found == ids(folder, text), text


def test_decoding_the_ids_gives_the_text_back(folder: Path) -> None:
    tokenizer = load(folder)
    for text in (*ADVERSARIAL_TEXTS, *TEXTS[:3]):
        expected = text if folder.name == "bpe" else text.replace("▁", " ")  # sentencepiece's mark for a space
        assert tokenizer.decode(ids(folder, text), skip_special_tokens=False) == expected


def test_a_literal_special_token_is_encoded_as_text(folder: Path) -> None:
    special = describe(folder, kind="bpe")["eos_id"]
    for text in ("<|endoftext|>", "a<|endoftext|>b", "<unk><s></s><0x0A>"):
        found = ids(folder, text)
        assert special not in found
        assert len(found) > 1
        assert load(folder).decode(found) == text


def test_the_fingerprint_survives_save_pretrained_and_use(folder: Path, tmp_path: Path) -> None:
    tokenizer = auto(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(
        ["long " * 50, "short"], padding="max_length", max_length=8, truncation=True
    )  # writes truncation and padding into tokenizer.json
    tokenizer.save_pretrained(str(tmp_path / "again"))
    assert tokenizer_fingerprint(tmp_path / "again") == tokenizer_fingerprint(folder)
    auto(tmp_path / "again").save_pretrained(str(tmp_path / "thrice"))
    assert tokenizer_fingerprint(tmp_path / "thrice") == tokenizer_fingerprint(folder)


def test_a_different_tokenizer_has_a_different_fingerprint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 5000, "content": "<|more|>"})
    path.write_text(json.dumps(content))
    assert tokenizer_fingerprint(tmp_path / "other") != tokenizer_fingerprint(folder)
    path.write_text("{}")
    with pytest.raises(DataError, match="damaged"):
        tokenizer_fingerprint(tmp_path / "other")


def test_the_manifest_entry_counts_added_tokens_and_names_the_special_ids(tmp_path: Path) -> None:
    folder = trained(tmp_path / "a", "bpe", special_tokens=["<|user|>"], eos_token="<end>")
    entry = describe(folder, kind="bpe")
    tokenizer = auto(folder)
    assert entry["vocab_size"] == len(tokenizer) == 400
    assert entry["eos_id"] == tokenizer.eos_token_id == 0
    assert tokenizer.convert_tokens_to_ids("<|user|>") == 1
    assert (entry["bos_id"], entry["pad_id"], entry["kind"]) == (None, None, "bpe")


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_deterministic_across_processes_and_thread_counts(kind: str, tmp_path: Path) -> None:
    """Each training runs in a new process, with its own hash seed and thread pool."""
    program = f"""if True:
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from data_prep.config.corpus import TokenizerSection
        from data_prep.tokenizer.train import train
        texts = {TEXTS[:40]!r}
        section = TokenizerSection(train={kind!r}, vocab_size=400)
        train(texts, Path(sys.argv[1]), section)
    """
    found = []
    for threads in ("1", "3"):
        folder = tmp_path / threads
        folder.mkdir()
        env = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run([sys.executable, "-c", program, str(folder)], env=env, check=True)
        found.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_converted_tokenizer_gives_the_ids_of_sentencepiece(kind: str, tmp_path: Path) -> None:
    model = (trained(tmp_path / "a", kind) / "tokenizer.model").read_bytes()
    converted, processor = sentencepiece_model.convert(model), sentencepiece_model.open_processor(model)
    converted.encode_special_tokens = True

    def check(text: str) -> None:
        ours, theirs = converted.encode(text, add_special_tokens=False).ids, processor.encode(text)
        if ours != theirs:  # ways of equal score: sentencepiece adds them in single precision, tokenizers in double
            assert processor.decode(ours) == processor.decode(theirs), text
            assert sum(map(processor.get_score, ours)) == pytest.approx(sum(map(processor.get_score, theirs)), 1e-5)

    for text in (*ADVERSARIAL_TEXTS, *TEXTS[:20]):
        check(text)

    @given(text=st.text(st.sampled_from("ab n°\n\t ▁<0x>é😀\x00mill_whe1"), max_size=40))
    @settings(max_examples=150, deadline=None)
    def agrees(text: str) -> None:
        check(text)

    agrees()


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_the_normalization_of_a_sentencepiece_model_is_kept(rule: str, model_type: str, work: Path) -> None:
    """Most published .model files use NFKC, a leading space and merged spaces."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(TEXTS).split("\n")),
        model_prefix="m",
        model_type=model_type,
        vocab_size=450,
        normalization_rule_name=rule,
        byte_fallback=True,
        required_chars="<>/_|[]()" + "".join(map(chr, range(0x30, 0x7B))),  # as in any large corpus
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (work / "imported").mkdir()
    existing.import_tokenizer("m.model", work / "imported")
    processor = sentencepiece.SentencePieceProcessor(model_file="m.model")
    assert ids(work / "imported", "  ﬁne   wheel ") == processor.encode("  ﬁne   wheel ")
    entry = describe(work / "imported", kind="given")
    assert (entry["eos_id"], entry["bos_id"]) == (processor.eos_id(), processor.bos_id())
    check_usable(work / "imported", TextPolicy(prepend_bos=False, append_eos=True, parse_special_tokens=False))


def test_an_imported_folder_keeps_its_fingerprint_and_special_ids(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "imported").mkdir()
    existing.import_tokenizer(str(folder), tmp_path / "imported")
    assert tokenizer_fingerprint(tmp_path / "imported") == tokenizer_fingerprint(folder)
    assert describe(tmp_path / "imported", kind="given")["eos_id"] == describe(folder, kind="given")["eos_id"]


def test_an_imported_folder_keeps_its_named_chat_templates(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "a")
    (tmp_path / "a" / "additional_chat_templates").mkdir()
    (tmp_path / "a" / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "imported").mkdir()
    existing.import_tokenizer(str(tmp_path / "a"), tmp_path / "imported")
    assert (tmp_path / "imported" / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"


def test_a_tokenizer_without_eos_is_refused_when_append_eos_is_set(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "a")
    (tmp_path / "a" / "tokenizer_config.json").write_text("{}")
    check_usable(tmp_path / "a", TextPolicy(prepend_bos=False, append_eos=False, parse_special_tokens=False))
    with pytest.raises(DataError, match="no end-of-document token"):
        check_usable(tmp_path / "a", TextPolicy(prepend_bos=False, append_eos=True, parse_special_tokens=False))


def test_eos_is_found_where_autotokenizer_finds_it(folder: Path, tmp_path: Path) -> None:
    """Folders of older versions of transformers name the special tokens in special_tokens_map.json only."""
    shutil.copytree(folder, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    eos = config.pop("eos_token")
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "a" / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": eos}}))
    (tmp_path / "imported").mkdir()
    existing.import_tokenizer(str(tmp_path / "a"), tmp_path / "imported")
    found = describe(tmp_path / "imported", kind="given")["eos_id"]
    assert found == describe(folder, kind="given")["eos_id"] == auto(tmp_path / "imported").eos_token_id
    assert template_tokens(read_config(tmp_path / "imported"))["eos_token"] == eos
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {}}))
    assert describe(tmp_path / "a", kind="given")["eos_id"] is None
    assert auto(tmp_path / "a").eos_token_id is None


def test_a_tokenizer_that_encodes_literal_special_tokens_as_special_ids_is_refused(tmp_path: Path) -> None:
    folder = trained(tmp_path / "a", "sentencepiece-unigram")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"][1][1] = (
        0.0  # the best of all scores for the piece <|endoftext|>, as other converters set it
    )
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="special id 1"):
        check_usable(folder, TextPolicy(prepend_bos=False, append_eos=True, parse_special_tokens=False))


def test_prepend_bos_and_parse_special_tokens_take_effect_in_the_shards(work: Path) -> None:
    (work / "texts").mkdir()
    for i in range(40):
        (work / "texts" / f"{i}.txt").write_text(f"{i} turns <|endoftext|> the wheel")
    folder = trained(work / "made", "bpe")
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"bos_token": named["eos_token"]}))
    eos, found = load(folder).token_to_id(named["eos_token"]), {}
    for special in (False, True):
        config = {
            "output": f"out{special}",
            "sources": [{"path": "texts"}],
            "tokenizer": {"path": str(folder)},
            "heldout_fraction": 0.2,
            "prepend_bos": True,
            "parse_special_tokens": special,
        }
        (work / "c.json").write_text(json.dumps(config))
        warm.run("-m", "data_prep", "--config", "c.json", cwd=work, imported="data_prep").check_returncode()
        file = TokenFile.open(shard_prefix(work / f"out{special}", "train", 0))
        found[special] = [part.tolist() for part in np.split(file.tokens, np.cumsum(file.sequence_lengths)[:-1])]
    assert {(ids[0], ids[-1], ids.count(eos)) for ids in found[False]} == {(eos, eos, 2)}
    assert {(ids[0], ids[-1], ids.count(eos)) for ids in found[True]} == {(eos, eos, 3)}


def test_a_vocabulary_size_that_the_text_cannot_fill_is_refused(tmp_path: Path) -> None:
    section = TokenizerSection(train="sentencepiece-bpe", vocab_size=300, special_tokens=[f"<{i}>" for i in range(100)])
    with pytest.raises(ConfigError, match="vocab_size"):
        train(["x"], tmp_path, section)


def test_a_path_that_is_not_a_tokenizer_is_refused(work: Path) -> None:
    (work / "empty").mkdir()
    (work / "a.txt").write_text("x")
    (work / "bad.model").write_text("no model")
    for path in ("nowhere", "empty", "a.txt"):
        with pytest.raises(ConfigError, match=r"tokenizer\.path"):
            fingerprint.check_path(path)
    with pytest.raises(DataError, match="not a sentencepiece model"):
        existing.import_tokenizer("bad.model", work / "empty")


def test_a_job_with_the_tokenizer_of_another_job_gives_the_same_shards(finished: Path) -> None:
    config = json.loads((finished / "corpus.json").read_text())
    name = write_config("given.json", **(config | {"output": "again", "tokenizer": {"path": "tokens/tokenizer"}}))
    cli("--config", name)
    for path in (finished / "tokens" / "train").iterdir():
        assert (finished / "again" / "train" / path.name).read_bytes() == path.read_bytes()
    parents = json.loads((finished / "again" / "manifest.json").read_text())["parents"]
    assert set(parents) == {"texts", "lines", "rows", "tokenizer"}
    assert "exists already" in cli("--config", name).stdout


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[]", b'{"model": {}}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_folder_is_an_error_with_its_file(name: str, content: bytes | None, tmp_path: Path) -> None:
    """As of a Megatron-LM dataset, whose tokenizer is described when training starts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_tokens(["a", "b"])
    write_folder(tokenizer, tmp_path, eos_token="a")
    assert describe(tmp_path, kind="given")["eos_id"] == 0
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    if name == "tokenizer_config.json" and content in (None, b'{"model": {}}'):  # a folder without special tokens
        assert describe(tmp_path, kind="given")["eos_id"] is None
        return
    with pytest.raises(DataError, match=f"{name} is (damaged|missing)"):
        describe(tmp_path, kind="given")
