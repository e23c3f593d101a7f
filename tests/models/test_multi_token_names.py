"""Modules for multi-token prediction are read from folders and exported under the names of their families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerFast

from foundation.errors import ConfigError
from pipeline.config.sections.run import ModelSection
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.stored_names import groups_of_model
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.folder.loading import load_model
from pipeline.models.folder.multi_token_names import module_names
from pipeline.run.prepare import first_values
from tests import warm
from tests.conftest import launch, tiny_config, write_config
from tests.support import output_of
from tests.sweeps.families import tiny_fields

NAMES = {
    "deepseek_v3": ("model.layers.4.enorm.weight", "model.layers.4.shared_head.norm.weight", "mlp.experts.3.up_proj"),
    "qwen3_next": ("mtp.pre_fc_norm_embedding.weight", "mtp.norm.weight", "mtp.layers.0.mlp.experts.3.up_proj"),
    "ernie4_5_moe": ("model.mtp_emb_norm.0.weight", "model.mtp_linear_proj.0.weight", "mtp_block.0.mlp.up_proj"),
    "llama": ("model.layers.4.hnorm.weight", "model.layers.4.eh_proj.weight", "model.layers.4.mlp.up_proj"),
}


def config_of(kind: str) -> Any:
    return AutoConfig.for_model(**{**tiny_fields(kind), "pad_token_id": 1})


def meta_of(kind: str, *, ahead: int = 1) -> Any:
    return build_meta(config_of(kind), dtype=torch.float32, attn_implementation="eager", ahead=ahead)


def stored(kind: str, model: Any) -> dict[str, Tensor]:
    """A model's first values by their names in a folder."""
    values, found = InitByName(model, seed=2), dict[str, Tensor]()
    names = [name for name, _ in model.named_parameters()]
    buffers = {name: torch.rand(b.shape) for name, b in model.named_buffers() if name in model.state_dict()}
    for group in groups_of_model(model, [*names, *buffers]):
        tensors = {name: buffers[name] if name in buffers else values.value(name) for name in group.names}
        for name, value in group.convert(tensors, model).items():
            found[module_names(kind).in_files(name, layers=4)] = value.contiguous().clone()
    return found


def folder_of(kind: str, tensors: dict[str, Tensor], folder: Path) -> Path:
    config_of(kind).save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", NAMES)
def test_a_folder_with_the_names_of_its_family_is_read(kind: str, tmp_path: Path) -> None:
    model = meta_of(kind)
    tensors = stored(kind, model)
    assert all(any(wanted in name for name in tensors) for wanted in NAMES[kind])
    values = FromSafetensors(folder_of(kind, tensors, tmp_path), model=model)
    assert values.fresh == () == tuple(values.left_out)
    expected = InitByName(model, seed=2)
    for name, _ in model.named_parameters():
        torch.testing.assert_close(values.value(name), expected.value(name), rtol=0, atol=0)


def test_modules_that_a_folder_lacks_are_initialized_and_others_of_unknown_form_refused(tmp_path: Path) -> None:
    tensors = stored("deepseek_v3", meta_of("deepseek_v3"))
    folder, model = folder_of("deepseek_v3", tensors, tmp_path / "one"), meta_of("deepseek_v3", ahead=2)
    section = ModelSection(path=str(folder))
    values = first_values(section, model, seed=7)
    assert isinstance(values, FromSafetensors)
    assert values.fresh == ("mtp.1.",)
    name = "mtp.1.eh_proj.weight"
    torch.testing.assert_close(values.value(name), InitByName(model, seed=7).value(name), rtol=0, atol=0)
    dropped = first_values(section.model_copy(update={"extra_weights": "drop"}), model, seed=7)
    assert isinstance(dropped, FromSafetensors)
    assert dropped.fresh == ("mtp.0.", "mtp.1.")
    strange = {name.replace("model.layers.4.", "mtp.block."): value for name, value in tensors.items()}
    section = ModelSection(path=str(folder_of("deepseek_v3", strange, tmp_path / "strange")))
    with pytest.raises(ConfigError, match=r"(?s)loss\.mtp.*form that is not known: mtp\.block.*extra_weights drop"):
        first_values(section, model, seed=7)


def test_trained_modules_are_exported_under_the_names_that_they_were_read_from(tokens: Path, tmp_path: Path) -> None:
    made, start = stored("deepseek_v3", meta_of("deepseek_v3")), tmp_path / "model"
    folder_of("deepseek_v3", made, start)
    PreTrainedTokenizerFast.from_pretrained(tokens / "tokenizer").save_pretrained(start)
    config = tiny_config(tokens, tmp_path / "run", model={"path": str(start)}, engine="torch")
    config["run"] |= {"steps": 1, "checkpoint_every": 1}
    config["loss"] = {"mtp": {}}
    config.pop("scheduler")
    said = launch("train.py", write_config(tmp_path / "c.json", config))
    assert "% of the drafts of mtp accepted" in said
    row = next(row for row in map(json.loads, (tmp_path / "run/metrics.jsonl").open()) if "mtp_loss" in row)
    assert row["loss"] == pytest.approx(row["cross_entropy"] + 0.3 * row["mtp_loss"], rel=1e-5)
    out = tmp_path / "out"
    output_of(warm.run("-m", "pipeline", "export", tmp_path / "run", out))
    tensors = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    copies = {f"model.layers.4.{name}" for name in ("embed_tokens.weight", "shared_head.head.weight")}
    assert tensors.keys() == made.keys() | copies
    assert not torch.equal(tensors["model.layers.4.eh_proj.weight"], made["model.layers.4.eh_proj.weight"])
    assert torch.equal(tensors["model.layers.4.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    load_model(out)  # strictly
