"""Loading weights from safetensors, resolving the model config, layer selection, and parameter and FLOP counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from headrace.base.errors import ConfigError, DataError
from pipeline.config.schema import ModelSection
from pipeline.models.count import measure
from pipeline.models.hf_config import resolve_hf_config
from pipeline.models.layers import keep_layers, original_name
from pipeline.models.materialise import materialise
from pipeline.models.meta import build_meta, parameter_shapes
from pipeline.models.values import FromSafetensors, InitByName

TOKENIZER: dict[str, Any] = {"vocab_size": 300, "bos_id": None, "eos_id": 0, "pad_id": None}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def resolve(section: dict[str, Any], sequence_length: int = 64) -> Any:
    return resolve_hf_config(ModelSection(**section), tokenizer=TOKENIZER, sequence_length=sequence_length)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = resolve({"config": LLAMA})
    model = build_meta(config, dtype=torch.float32, attn_implementation="sdpa")
    materialise(model, InitByName(model, seed=0), device=torch.device("cpu"))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def shapes_of(folder: Path) -> dict[str, torch.Size]:
    config = AutoConfig.from_pretrained(folder)
    return parameter_shapes(build_meta(config, dtype=torch.float32, attn_implementation="sdpa"))


def test_saved_weights_are_loaded_unchanged(folder: Path) -> None:
    values = FromSafetensors(folder, shapes=shapes_of(folder))
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(values.value(name), tensor)


def test_missing_unexpected_and_misshapen_tensors_are_refused(folder: Path) -> None:
    file, shapes = folder / "model.safetensors", shapes_of(folder)
    original = load_file(file)
    first = next(iter(original))
    save_file({k: v for k, v in original.items() if k != first}, file)
    with pytest.raises(DataError, match=rf"missing \(1\): {first}"):
        FromSafetensors(folder, shapes=shapes)
    save_file({**original, "stray": torch.zeros(1)}, file)
    with pytest.raises(DataError, match=r"unexpected \(1\): stray"):
        FromSafetensors(folder, shapes=shapes)
    save_file({**original, first: torch.zeros(3, 3)}, file)
    with pytest.raises(DataError, match=r"has shape \(3, 3\)"):
        FromSafetensors(folder, shapes=shapes)


def test_a_truncated_file_and_an_empty_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    shapes, file = shapes_of(folder), folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    for path in (folder, tmp_path):
        with pytest.raises(DataError, match="no complete safetensors weights"):
            FromSafetensors(path, shapes=shapes)


def test_kept_layers_load_the_weights_of_their_original_layers(folder: Path) -> None:
    config = keep_layers(AutoConfig.from_pretrained(folder), [0, 3])
    model = build_meta(config, dtype=torch.float32, attn_implementation="sdpa")
    rename = original_name([0, 3])
    values = FromSafetensors(folder, shapes=parameter_shapes(model), rename=rename, partial=True)
    original = load_file(folder / "model.safetensors")
    assert torch.equal(values.value("model.layers.1.mlp.up_proj.weight"), original["model.layers.3.mlp.up_proj.weight"])
    assert torch.equal(values.value("model.norm.weight"), original["model.norm.weight"])


@pytest.mark.parametrize("layers", [[4], [0, 0], [1, 2, 3, 9]])
def test_invalid_layer_selections_are_refused(folder: Path, layers: list[int]) -> None:
    with pytest.raises(ConfigError, match="layers 0 to 3"):
        keep_layers(AutoConfig.from_pretrained(folder), layers)


def test_the_vocabulary_size_follows_from_the_tokenizer_and_a_smaller_one_is_refused() -> None:
    assert resolve({"config": LLAMA}).vocab_size == 320  # 300, up to a multiple of 64
    with pytest.raises(ConfigError, match="the dataset's tokenizer has 300 ids"):
        resolve({"config": {**LLAMA, "vocab_size": 299}})


def test_a_misspelt_model_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'num_hidden_layers'"):
        resolve({"config": {**LLAMA, "num_hiden_layers": 2}})
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        resolve({"config": {**LLAMA, "model_type": "lama"}})


def test_a_key_given_by_its_alias_overrides_the_default() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}
    assert resolve({"config": {**gpt2, "n_positions": 96}}).n_positions == 96
    assert resolve({"config": gpt2}).n_positions == 2048
    with pytest.raises(ConfigError, match="max_position_embeddings 16"):
        resolve({"config": {**gpt2, "n_positions": 16}})
    with pytest.raises(ConfigError, match="num_hidden_layers = -2"):
        resolve({"config": {**gpt2, "n_layer": -2}})


@pytest.mark.parametrize("wrong", [{"rms_norm_eps": "1e-5"}, {"tie_word_embeddings": "yes"}])
def test_a_model_key_of_a_wrong_type_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        resolve({"config": {**LLAMA, **wrong}})


def test_a_bidirectional_model_is_refused() -> None:
    bert = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(ConfigError, match="sees the tokens to its right"):
        resolve({"config": bert})


def test_a_parameter_that_transformers_does_not_initialise_is_refused() -> None:
    config = resolve({"config": {"model_type": "openai-gpt", "n_embd": 32, "n_layer": 2, "n_head": 4}})
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    with pytest.raises(ConfigError, match=r"does not set .*c_attn\.weight"):
        materialise(model, InitByName(model, seed=0), device=torch.device("cpu"))


def test_a_sequence_longer_than_a_loaded_models_positions_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings 2048"):
        resolve({"path": str(folder)}, sequence_length=4096)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        resolve({"path": str(tmp_path)})


def test_parameters_and_flops_per_token_of_llama_8b() -> None:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    model = build_meta(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    size = measure(model, config, sequence_length=8192)
    assert size.parameters == 8_030_261_248
    assert size.flops_per_token / 1e9 == pytest.approx(57.9, abs=0.05)
