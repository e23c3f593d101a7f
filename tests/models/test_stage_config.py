"""A stage's changes to the config of a model folder: keys of the family that keep all shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from foundation.errors import ConfigError
from pipeline.config.sections.run import ModelSection
from pipeline.models.construction.meta import build_meta
from pipeline.models.hf_config import resolve_hf_config
from pipeline.run.prepare import check_same_shapes

TOKENIZER = {"vocab_size": 64, "bos_id": 0, "eos_id": 1, "pad_id": None}
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def changed(folder: Path, base: PretrainedConfig, changes: dict[str, Any], *, length: int = 64) -> PretrainedConfig:
    base.save_pretrained(folder)
    section = ModelSection(path=str(folder))
    return resolve_hf_config(section, tokenizer=TOKENIZER, sequence_length=length, changes=changes)


def on_meta(config: PretrainedConfig) -> nn.Module:
    return build_meta(config, dtype=torch.float32, attn_implementation="sdpa")


def test_rope_and_positions_change_and_the_rest_stays(tmp_path: Path) -> None:
    base = LlamaConfig(**TINY, max_position_embeddings=128, rope_parameters={"rope_type": "default", "rope_theta": 7e5})
    changes = {"rope_parameters": YARN, "max_position_embeddings": 512}
    found = changed(tmp_path, base, changes, length=512)
    assert found.rope_parameters["rope_type"] == "yarn"
    assert found.rope_parameters["rope_theta"] == 7e5  # merged key by key
    assert (found.max_position_embeddings, found.hidden_size) == (512, 32)
    check_same_shapes(on_meta(base), on_meta(found))


def test_longer_sequences_than_the_stage_has_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings 128"):
        changed(tmp_path, LlamaConfig(**TINY, max_position_embeddings=128), {"rope_parameters": YARN}, length=512)


def test_a_rope_that_the_family_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    base = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    with pytest.raises(ConfigError, match="gpt2 has no such key") as error:
        changed(tmp_path, base, {"rope_parameters": {"rope_theta": 1e6}})
    assert error.value.field == "model.config.rope_parameters"


def test_another_shape_is_refused_with_the_parameter(tmp_path: Path) -> None:
    base = LlamaConfig(**TINY)
    found = changed(tmp_path, base, {"intermediate_size": 64})
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj\.weight has the shape \[64, 32\] then, and \[48, 32\]"):
        check_same_shapes(on_meta(base), on_meta(found))
