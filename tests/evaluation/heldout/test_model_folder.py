"""Metadata of a model folder is read from its files alone, whether the weights are in one file or several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.base.errors import DataError
from pipeline.models.folder.model_folder import ModelFolder
from tests.evaluation.heldout.small import VOCAB, make_model


@pytest.fixture(scope="module")
def sharded(model: Path) -> Path:
    folder = model.parent / "sharded"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder, max_shard_size="100KB")
    return folder


def test_headers_agree_with_the_loaded_model(model: Path) -> None:
    folder, loaded = ModelFolder.open(model), AutoModelForCausalLM.from_pretrained(model)
    assert folder.parameters == sum(p.numel() for p in loaded.parameters())
    assert {name: info.shape for name, info in folder.tensors.items()} == {
        name: tuple(p.shape) for name, p in loaded.named_parameters()
    }
    assert (folder.vocab_size, folder.longest_sequence, folder.tied, folder.dtype) == (VOCAB, 128, True, "float32")


def test_an_untied_model_is_recognized(tokens: Path, tmp_path: Path) -> None:
    assert not ModelFolder.open(make_model(tmp_path / "untied", tokens, tied=False, steps=0)).tied


def test_shards_count_like_one_file(model: Path, sharded: Path) -> None:
    one, many = ModelFolder.open(model), ModelFolder.open(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert many.tensors == one.tensors
    assert many.weight_bytes == sum(p.stat().st_size for p in sharded.glob("*.safetensors"))


def test_a_missing_shard_is_detected(sharded: Path) -> None:
    lost = max(sharded.glob("*.safetensors"))
    lost.unlink()
    with pytest.raises(DataError, match=rf"{lost.name} is missing"):
        ModelFolder.open(sharded)


def test_the_fingerprint_of_a_folder_without_a_manifest_depends_on_its_bytes(model: Path, tmp_path: Path) -> None:
    before = ModelFolder.open(model).fingerprint()
    assert ModelFolder.open(model).fingerprint() == before
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        loaded.model.norm.weight[0] += 1
    loaded.save_pretrained(tmp_path / "changed")
    assert ModelFolder.open(tmp_path / "changed").fingerprint() != before
