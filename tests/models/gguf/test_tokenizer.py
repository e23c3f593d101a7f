"""Tokenizers of data prep in GGUF files: llama.cpp gives the ids of tokenizers, or they are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foundation.errors import ConfigError
from pipeline.evaluation.consumers.texts import AWKWARD, texts_of
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.gguf.plan import plan_file
from pipeline.models.gguf.tokenizer import read_tokenizer
from pipeline.models.gguf.write import FILE, write
from pipeline.models.split_names import SPLITS, split_name
from pipeline.models.tokenizer_files import copy_tokenizer
from tests.conftest import make_tokens, text_folders
from tests.evaluation.heldout.small import VOCAB, make_tokenizer

# an error in C ends the process, so llama.cpp is asked in one of its own
ASK = """
import json, sys
from pathlib import Path
from pipeline.models.gguf.libllama import Model
model = Model(Path(sys.argv[1]))
texts = json.loads(Path(sys.argv[2]).read_text())
print(json.dumps([model.tokenize(text, add_special=False, parse_special=False) for text in texts]))
"""


def folder_with(tokenizer: Path, folder: Path) -> ModelFolder:
    """A model of one small layer with a tokenizer."""
    size = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=size, max_position_embeddings=64, **shape)).save_pretrained(folder)
    copy_tokenizer(tokenizer, folder)
    return ModelFolder.open(folder)


def ids_of_llama_cpp(source: ModelFolder, work: Path, texts: list[str]) -> list[list[int]]:
    write(plan_file(source, "F32"), work)
    (work / "texts.json").write_text(json.dumps(texts))
    command = [sys.executable, "-c", ASK, str(work / FILE), str(work / "texts.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def texts() -> list[str]:
    files = [path.read_text(encoding="utf-8") for folder in text_folders() for path in sorted(folder.rglob("*.py"))]
    return [*AWKWARD, *(text for text in files if text)]


@pytest.mark.integration
@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.parametrize("kind", ["bpe", "sentencepiece-bpe"])
def test_llama_cpp_gives_the_ids_of_a_tokenizer_that_data_prep_trains(kind: str, tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path, text_folders(), tokenizer={"train": kind, "vocab_size": 700})
    source = folder_with(tokens / "tokenizer", tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer/tokenizer.json"))
    tokenizer.encode_special_tokens = True
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts()]
    assert ids_of_llama_cpp(source, tmp_path, texts()) == expected


@pytest.mark.usefixtures("llama_cpp")
def test_llama_cpp_gives_the_ids_of_gpt2s_split(tmp_path: Path) -> None:
    fast = make_tokenizer(tmp_path / "tokenizer")
    source = folder_with(tmp_path / "tokenizer", tmp_path / "model")
    given = texts()[:40]
    expected = [fast(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] for text in given]
    assert ids_of_llama_cpp(source, tmp_path, given) == expected


def test_unigram_is_refused(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path, text_folders(), tokenizer={"train": "sentencepiece-unigram", "vocab_size": 700})
    with pytest.raises(ConfigError, match="unigram"):
        read_tokenizer(tokens / "tokenizer", vocabulary=700)


def test_a_split_without_a_name_in_llama_cpp_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    assert split_name(raw) == "gpt-2"
    raw["pre_tokenizer"] = {"type": "Whitespace"}
    with pytest.raises(ConfigError, match="does not have its pre-tokenizer"):
        split_name(raw)
    raw["normalizer"] = {"type": "NFC"}
    with pytest.raises(ConfigError, match="normalizes text"):
        split_name(raw)


def make_words_before_merges(folder: Path, pattern: str | None) -> dict[str, Any]:
    """A tokenizer.json with a word that no merges make, found as Llama 3's are: `ignore_merges`."""
    make_tokenizer(folder)
    raw: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    last = max(vocab, key=vocab.__getitem__)
    parts = (each.split(" ") if isinstance(each, str) else each for each in raw["model"]["merges"])
    raw["model"]["merges"] = [each for each in parts if "".join(each) != last]
    vocab["zebra"] = vocab.pop(last)
    raw["model"]["ignore_merges"] = True
    if pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        steps = [split, {**BYTES, "use_regex": False}]
        raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return raw


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


@pytest.mark.usefixtures("llama_cpp")
def test_words_that_come_before_merges_have_their_ids_in_llama_cpp(tmp_path: Path) -> None:
    (llama3,) = (pattern for pattern, name in SPLITS.items() if name == "smaug-bpe")
    make_words_before_merges(tmp_path / "tokenizer", llama3)
    source = folder_with(tmp_path / "tokenizer", tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(source.path / "tokenizer.json"))
    given = texts_of(source.path, np.zeros((0, 8), np.int64))
    assert "zebra" in given  # so the gate compares it
    tokenizer.encode_special_tokens = True
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in given]
    assert [tokenizer.token_to_id("zebra")] in expected
    assert ids_of_llama_cpp(source, tmp_path, list(given)) == expected


def test_words_that_come_before_merges_are_refused_where_llama_cpp_goes_by_merges(tmp_path: Path) -> None:
    raw = make_words_before_merges(tmp_path, None)
    with pytest.raises(ConfigError, match=r"1 words of its vocabulary, e.g. 'zebra', come before merges"):
        split_name(raw)
    del raw["model"]["vocab"]["zebra"]  # the others are what their merges make
    assert split_name(raw) == "gpt-2"


@pytest.mark.parametrize("key", ["dropout", "end_of_word_suffix", "continuing_subword_prefix"])
def test_what_a_bpe_model_does_besides_merges_is_refused(key: str, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["model"][key] = 0.1 if key == "dropout" else "</w>"
    with pytest.raises(ConfigError, match=key):
        split_name(raw)


def test_tokens_that_the_model_has_no_row_for_are_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=f"the model has a vocabulary of {VOCAB - 1}"):
        read_tokenizer(tmp_path, vocabulary=VOCAB - 1)


def test_a_tokenizer_that_puts_bos_in_front_says_so(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing  # noqa: PLC0415

    fast: PreTrainedTokenizerFast = make_tokenizer(tmp_path)
    assert not read_tokenizer(tmp_path, vocabulary=VOCAB).adds_bos
    end = fast.eos_token
    template = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, fast.eos_token_id)])
    fast.backend_tokenizer.post_processor = template
    fast.bos_token = end
    fast.save_pretrained(tmp_path)
    found = read_tokenizer(tmp_path, vocabulary=VOCAB)
    assert found.adds_bos
    assert found.ids["bos"] == fast.eos_token_id


ASK_ENDS = """
import ctypes, json, sys
from pathlib import Path
from pipeline.models.gguf.libllama import Model
model = Model(Path(sys.argv[1]))
is_end = model._library.llama_vocab_is_eog
is_end.restype, is_end.argtypes = ctypes.c_bool, [ctypes.c_void_p, ctypes.c_int32]
print(json.dumps([number for number in range(model.vocabulary_size) if is_end(model._vocabulary, number)]))
"""


def with_ends(folder: Path, ends: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


@pytest.mark.usefixtures("llama_cpp")
def test_llama_cpp_stops_at_every_token_that_ends_a_generation(tmp_path: Path) -> None:
    fast = make_tokenizer(tmp_path / "tokenizer")
    source = folder_with(tmp_path / "tokenizer", tmp_path / "model")
    ends = sorted([7, 9, fast.eos_token_id])
    with_ends(source.path, ends)
    write(plan_file(source, "F32"), tmp_path)
    command = [sys.executable, "-c", ASK_ENDS, str(tmp_path / FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == ends


def test_special_tokens_are_found_where_autotokenizer_finds_them(tmp_path: Path) -> None:
    fast = make_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {"eos_token": config.pop("eos_token")}
    config.pop("added_tokens_decoder", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_tokenizer(tmp_path, vocabulary=VOCAB).ids == {}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    assert read_tokenizer(tmp_path, vocabulary=VOCAB).ids == {"eos": fast.eos_token_id}


def test_more_ends_than_a_file_can_name_are_refused_and_fewer_taken(tmp_path: Path) -> None:
    fast = make_tokenizer(tmp_path)
    ends = [fast.eos_token_id, 7, 8, 9]
    with_ends(tmp_path, ends)
    with pytest.raises(ConfigError, match=r"4 tokens end a generation.*\n.*leave 3"):
        read_tokenizer(tmp_path, vocabulary=VOCAB)
    with_ends(tmp_path, ends[:3])
    assert read_tokenizer(tmp_path, vocabulary=VOCAB).ids == {"eos": fast.eos_token_id, "eot": 7, "eom": 8}
    with_ends(tmp_path, VOCAB)
    with pytest.raises(ConfigError, match=f"{VOCAB} ends a generation"):
        read_tokenizer(tmp_path, vocabulary=VOCAB)


@pytest.mark.parametrize("files", [True, False], ids=["files", "list"])
def test_of_several_chat_templates_the_default_is_taken_and_the_others_are_named(files: bool, tmp_path: Path) -> None:
    from gguf import GGUFReader  # noqa: PLC0415

    fast = make_tokenizer(tmp_path / "tokenizer")
    templates = {"default": "{{ messages }}", "rag": "{{ documents }}", "tool_use": "{{ tools }}"}
    fast.chat_template = templates
    fast.save_pretrained(tmp_path / "tokenizer", save_jinja_files=files)
    assert (tmp_path / "tokenizer/additional_chat_templates").is_dir() is files
    source = folder_with(tmp_path / "tokenizer", tmp_path / "model")
    write(plan_file(source, "F32"), tmp_path)
    fields = GGUFReader(tmp_path / FILE).fields
    found = {name: field.contents() for name, field in fields.items() if "chat_template" in name}
    key = "tokenizer.chat_template"
    assert found == {key: templates["default"], f"{key}.rag": templates["rag"]} | {
        f"{key}.tool_use": templates["tool_use"],
        f"{key}s": ["rag", "tool_use"],
    }


def test_tokens_that_were_added_to_a_sentencepiece_model_are_written_and_another_models_are_refused(
    tmp_path: Path,
) -> None:
    tokens = make_tokens(tmp_path, text_folders(), tokenizer={"train": "sentencepiece-bpe", "vocab_size": 700})
    folder = tokens / "tokenizer"
    raw = json.loads((folder / "tokenizer.json").read_text())
    turn = {**raw["added_tokens"][0], "id": 700, "content": "<|turn|>", "special": True}
    raw["added_tokens"].append(turn)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    assert read_tokenizer(folder, vocabulary=704).tokens[699:702] == [pieces(raw)[699], "<|turn|>", "[PAD701]"]
    vocabulary = raw["model"]["vocab"]
    last, other = pieces(raw)[699], pieces(raw)[698]
    raw["model"]["vocab"] = {**vocabulary, last: 698, other: 699}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"id 698 is .* in tokenizer.json and .* in tokenizer.model"):
        read_tokenizer(folder, vocabulary=704)


def pieces(raw: dict[str, Any]) -> dict[int, str]:
    return {number: token for token, number in raw["model"]["vocab"].items()}
