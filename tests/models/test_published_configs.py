"""`model.config` takes published config.json files, and reads them as transformers does."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foundation.errors import ConfigError, problems_in
from pipeline.config.family_keys import as_read, families, family, key_problems
from pipeline.config.load import read_config
from pipeline.config.rules.resolve import resolve
from pipeline.config.rules.training import check_model
from pipeline.config.sections.run import ModelSection
from pipeline.models.hf_config import resolve_hf_config
from tests.conftest import tiny_config, write_config

TYPED: dict[str, dict[str, Any]] = json.loads(Path("tests/fixtures/published_configs.json").read_text())
MADE = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "gemma", "gemma2", "phi", "phi3", "stablelm"),
    *("starcoder2", "olmo", "olmo2", "olmoe", "cohere", "cohere2", "granite", "granitemoe", "glm", "glm4", "exaone4"),
    *("smollm3", "helium", "ernie4_5", "seed_oss", "apertus", "arcee", "hunyuan_v1_dense", "minimax", "jetmoe"),
    *("persimmon", "falcon", "gpt_neox", "nemotron", "deepseek_v3"),
)
"""Families whose config, with the class's own defaults, is written as versions before transformers 5 wrote it."""
FROM_DATA = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"}
"""Keys that follow the tokens where the file has none."""


def old_file(kind: str) -> dict[str, Any]:
    """The config of a family's defaults under the names from before transformers 5."""
    fields = CONFIG_MAPPING[kind]().to_dict()
    rope = fields.pop("rope_parameters", None) or {}
    if "rope_theta" in rope:
        fields |= {"rope_theta": 2 * rope["rope_theta"], "rope_scaling": None}
    if "partial_rotary_factor" in rope:
        fields["partial_rotary_factor"] = rope["partial_rotary_factor"]
    name = "models/old"
    return {**fields, "_name_or_path": name, "torch_dtype": "bfloat16", "transformers_version": "4.46.0", "n_old": 1}


FILES = {**TYPED, **{f"{kind}, made": old_file(kind) for kind in MADE}}


def test_there_are_sixty_files() -> None:
    assert len(FILES) >= 60


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    file = FILES[name]
    (tmp_path / "config.json").write_text(json.dumps(file))
    theirs = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False).to_dict()
    raw = {**tiny_config(tmp_path / "tokens", tmp_path / "run"), "model": {"config": file}}
    loaded = read_config(write_config(tmp_path / "c.json", raw))
    resolve(loaded.config, world_size=1, begun=False)  # all that --rules-only checks
    tokenizer = {"vocab_size": 64, "bos_id": 0, "eos_id": 1, "pad_id": None}
    ours = resolve_hf_config(loaded.config.model, tokenizer=tokenizer, sequence_length=32).to_dict()
    stored = CONFIG_MAPPING[file["model_type"]].attribute_map
    derived = FROM_DATA - {*file, *(stored.get(key, key) for key in file)}
    left_out = {text.partition(" ")[0].removeprefix("model.config.") for text in loaded.ignored}
    unlike = {key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)} - derived - {"pad_token_id"}
    assert unlike <= left_out | {"_name_or_path"}
    assert not left_out & family(file["model_type"]).keys  # type: ignore[union-attr]


def test_the_keys_of_every_family_are_those_of_its_class() -> None:
    for kind in (each for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if each in families()):
        own, found = CONFIG_MAPPING[kind], family(kind)
        named = own.attribute_map
        signature = {*inspect.signature(own.__init__).parameters} - {"self", "kwargs"}
        assert found is not None, kind
        assert found.keys == {*signature, *named, *named.values(), "model_type", "per_layer_config"}, kind


def test_a_typo_in_a_published_file_is_refused() -> None:
    file = dict(TYPED["Llama-3.1-8B"])
    file["num_hiden_layers"] = file.pop("num_hidden_layers")
    (problem,) = key_problems(as_read(file)[0])
    assert problem.field == "model.config.num_hiden_layers"
    assert problem.remedy == "did you mean 'num_hidden_layers'?"


def test_all_wrong_keys_are_refused_at_once_without_the_model() -> None:
    config = {"model_type": "gpt2", "rope_theta": 1e6, "n_lyer": 2, "n_embd": -3, "hidden_size": 4}
    with pytest.raises(ConfigError) as refused:
        check_model(ModelSection(config=config), sequence_length=8)
    fields = [each.field.removeprefix("model.config.") for each in problems_in(refused.value)]
    assert fields == ["rope_theta", "n_lyer", "hidden_size", "n_embd"]


def test_two_values_of_the_base_of_rope_are_refused() -> None:
    config = {"model_type": "llama", "rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    (problem,) = key_problems(config)
    assert (problem.field, problem.value) == ("model.config.rope_theta", 1e6)
    config.pop("rope_theta")
    assert not [*key_problems(config)]


def test_a_stage_is_told_the_name_of_today() -> None:
    (problem,) = key_problems({"model_type": "llama", "rope_theta": 8e6}, legacy=False)
    words = json.loads(problem.remedy.removeprefix("use "))
    assert words == {"rope_parameters": {"rope_theta": 8e6}}
    assert not [*key_problems({"model_type": "llama", **words}, legacy=False)]
