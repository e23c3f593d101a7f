"""Model folders that can be read in two ways are refused by every reader, and each remedy that is printed works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BigBirdPegasusConfig,
    GemmaConfig,
    LlamaConfig,
    PretrainedConfig,
)

from foundation.errors import ConfigError, DataError
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.folder.loading import load_model
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.folder.weight_files import INDEX, SINGLE
from pipeline.models.gguf.write import Weights
from pipeline.models.hf_config import read_hf_config
from tests import warm
from tests.models.architectures import COMMON
from tests.support import output_of

SIZES: dict[str, Any] = {**COMMON, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(folder: Path, config: PretrainedConfig, **how: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **how)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "model", LlamaConfig(**SIZES, tie_word_embeddings=True))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save(tmp_path / "sharded", LlamaConfig(**SIZES, tie_word_embeddings=True), max_shard_size="20KB")


def values(folder: Path) -> FromSafetensors:
    config = AutoConfig.from_pretrained(folder)
    return FromSafetensors(folder, model=build_meta(config, dtype=torch.float32, attn_implementation="sdpa"))


READERS: dict[str, Callable[[Path], Any]] = {
    "folder": ModelFolder.open,  # of pruning, quantization, GGUF, evaluation, distillation
    "training": values,
    "loading": load_model,
    "gguf": Weights,
}


def refused(folder: Path, *words: str, readers: tuple[str, ...] = tuple(READERS)) -> str:
    text = ""
    for name in readers:
        with pytest.raises(DataError) as caught:
            READERS[name](folder)
        text = str(caught.value)
        assert all(word in text for word in words), (name, text)
    return text


def read(folder: Path) -> None:
    for reader in READERS.values():
        reader(folder)


def rewritten(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def config_changed(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def command_of(text: str) -> str:
    """The program in a printed `python -c "..."`."""
    found = re.search(r'python -c "(.*?)"', text)
    assert found is not None, text
    return found[1]


def test_a_head_that_config_json_ties_and_the_files_do_not_is_refused_and_each_remedy_works(folder: Path) -> None:
    rewritten(folder / SINGLE, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    refused(folder, HEAD, EMBEDDING, readers=("folder", "training", "loading"))
    config_changed(folder, tie_word_embeddings=False)
    read(folder)
    assert torch.equal(values(folder).value(HEAD), load_file(folder / SINGLE)[HEAD])
    config_changed(folder, tie_word_embeddings=True)
    rewritten(folder / SINGLE, lambda tensors: tensors.pop(HEAD))
    read(folder)


def test_a_head_that_is_the_embedding_is_read_as_tied(folder: Path) -> None:
    rewritten(folder / SINGLE, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    read(folder)


def test_a_head_of_a_family_that_ties_by_default_is_refused_too(tmp_path: Path) -> None:
    folder = save(tmp_path / "gemma", GemmaConfig(**SIZES))
    rewritten(folder / SINGLE, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, HEAD, EMBEDDING, readers=("folder", "training", "loading"))


def test_a_head_that_transformers_never_ties_is_no_contradiction(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "vocab_size": 64, "encoder_layers": 1}
    decoder = {"decoder_layers": 1, "decoder_ffn_dim": 32, "decoder_attention_heads": 4}
    folder = save(tmp_path / "model", BigBirdPegasusConfig(**sizes, **decoder, tie_word_embeddings=True))
    stored = load_file(folder / SINGLE)
    assert not torch.equal(stored[HEAD], stored["model.decoder.embed_tokens.weight"])
    ModelFolder.open(folder)


def test_a_single_file_beside_an_index_is_refused_where_the_two_differ(folder: Path, sharded: Path) -> None:
    shutil.copyfile(folder / SINGLE, sharded / SINGLE)
    read(sharded)  # the same values
    rewritten(sharded / SINGLE, lambda tensors: tensors[EMBEDDING].add_(1))
    refused(sharded, SINGLE, INDEX, EMBEDDING)
    rewritten(sharded / SINGLE, lambda tensors: tensors.pop(EMBEDDING))
    refused(sharded, SINGLE, INDEX, EMBEDDING)
    (sharded / SINGLE).unlink()
    read(sharded)


def test_files_that_transformers_does_not_read_are_not_read(folder: Path, sharded: Path) -> None:
    for each in (folder, sharded):
        before = {name: (info.file, info.begin) for name, info in ModelFolder.open(each).tensors.items()}
        other = {EMBEDDING: torch.zeros(64, 32), "tok_embeddings.weight": torch.zeros(2)}
        save_file(other, each / "zconsolidated.safetensors")
        assert {name: (info.file, info.begin) for name, info in ModelFolder.open(each).tensors.items()} == before
        assert Weights(each).read(EMBEDDING).any()


def test_an_index_that_names_a_wrong_file_is_refused_with_the_right_one(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    right = index["weight_map"][EMBEDDING]
    wrong = next(name for name in index["weight_map"].values() if name != right)
    index["weight_map"][EMBEDDING] = wrong
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, INDEX, EMBEDDING, wrong, f"write {right}")
    index["weight_map"][EMBEDDING] = right
    (sharded / INDEX).write_text(json.dumps(index))
    read(sharded)


def test_a_tensor_in_two_shards_is_refused_where_they_differ(sharded: Path) -> None:
    first, last = (f(file.name for file in sharded.glob("*.safetensors")) for f in (min, max))
    name, value = next(iter(load_file(sharded / first).items()))
    rewritten(sharded / last, lambda tensors: tensors.update({name: value}))
    read(sharded)
    rewritten(sharded / last, lambda tensors: tensors.update({name: value + 1}))
    refused(sharded, first, last, name)


def test_pickled_weights_are_refused_with_a_command_that_converts_them(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / SINGLE)
    torch.save(tensors, folder / "pytorch_model.bin")
    read(folder)  # whoever reads both takes the safetensors
    (folder / SINGLE).unlink()
    text = refused(folder, "pytorch_model.bin")
    output_of(warm.run("-c", command_of(text), cwd=tmp_path))
    read(folder)
    assert torch.equal(values(folder).value(EMBEDDING), tensors[EMBEDDING])


def test_weights_under_another_name_are_refused_with_the_name_that_works(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "model.fp16.safetensors")
    refused(folder, "model.fp16.safetensors", f"to {SINGLE}")
    (folder / "model.fp16.safetensors").rename(folder / SINGLE)
    read(folder)


def test_an_adapter_is_refused_alone_and_beside_its_base(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "adapter"
    alone.mkdir()
    for each in (alone, folder):
        about = {"base_model_name_or_path": "org/base", "peft_type": "LORA"}
        (each / "adapter_config.json").write_text(json.dumps(about))
    assert "org/base" in refused(alone, "adapter_config.json", "merge_and_unload", readers=("folder", "gguf"))
    with pytest.raises(DataError, match="adapter"):
        read_hf_config(alone)
    refused(folder, "adapter_config.json", SINGLE, "merge_and_unload")
    (folder / "adapter_config.json").unlink()
    read(folder)


def test_two_scalings_of_rotary_positions_are_refused(folder: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    config_changed(folder, rope_parameters=rope, rope_scaling={"type": "linear", "factor": 2.0})
    ModelFolder.open(folder)
    config_changed(folder, rope_parameters=rope, rope_scaling={"type": "linear", "factor": 4.0})
    refused(folder, "rope_scaling", "rope_parameters", "2.0", "4.0", readers=("folder", "loading"))
    with pytest.raises(DataError, match="rope_scaling"):
        read_hf_config(folder)


def test_a_folder_with_code_of_its_own_is_refused_without_a_question(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(_text: object) -> str:
        pytest.fail("it asked")

    monkeypatch.setattr("builtins.input", asked)
    code = {"AutoConfig": "configuration_novel.NovelConfig", "AutoModelForCausalLM": "modeling_novel.NovelForCausalLM"}
    config_changed(folder, auto_map=code)
    read(folder)  # transformers has the architecture itself
    config_changed(folder, model_type="vit")  # which transformers has, and not as a model of language
    with pytest.raises(DataError, match="cannot be loaded"):
        load_model(folder)
    with pytest.raises(ConfigError, match="transformers refuses it"):
        build_meta(read_hf_config(folder), dtype=torch.float32, attn_implementation="eager")
    config_changed(folder, model_type="novel")
    refused(folder, "configuration_novel.py", "'novel'", "own-loop", readers=("folder", "loading"))
    with pytest.raises(DataError, match="not executed"):
        read_hf_config(folder)


@pytest.mark.integration
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "base_model.model."])
@pytest.mark.parametrize("saved", ["folder", "sharded"])
def test_a_prefix_of_a_wrapper_is_named_and_the_printed_command_takes_it_away(
    saved: str, prefix: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(saved)
    before = {name: values(folder).value(name) for name in load_file_of(folder)}
    for file in folder.glob("*.safetensors"):
        save_file({prefix + k: v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    if (index := folder / INDEX).is_file():
        content = json.loads(index.read_text())
        content["weight_map"] = {prefix + k: v for k, v in content["weight_map"].items()}
        index.write_text(json.dumps(content))
    said = refused(folder, "which a wrapper has put into every name", readers=("training",))
    subprocess.run(said.partition("out of them: ")[2], shell=True, check=True)
    after = values(Path(f"{folder}-renamed"))
    assert all(torch.equal(after.value(name), tensor) for name, tensor in before.items())


def load_file_of(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


def test_a_missing_head_is_never_drawn_at_random_by_a_remedy(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", LlamaConfig(**SIZES, tie_word_embeddings=False))
    rewritten(folder / SINGLE, lambda tensors: tensors.pop(HEAD))
    said = refused(folder, '"tie_word_embeddings": true', HEAD, readers=("training",))
    assert "save_pretrained" not in said
    config_changed(folder, tie_word_embeddings=True)
    values(folder)
    rewritten(folder / SINGLE, lambda tensors: tensors.pop("model.norm.weight"))
    said = refused(folder, "model.norm.weight", "draw missing tensors at random", readers=("training",))
