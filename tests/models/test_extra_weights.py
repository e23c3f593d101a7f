"""Layers that predict more tokens are named, kept unchanged by every verb that writes a folder, or dropped by a key."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_layers import MtpModel

from foundation.errors import ConfigError, DataError
from foundation.section import parse
from pipeline.checkpoint.export.export import export
from pipeline.checkpoint.export.find import find_checkpoint
from pipeline.compress.pruning.config import PruneConfig
from pipeline.compress.pruning.rules import prepare as prepare_pruning
from pipeline.models.construction.extra_tensors import stored_extras
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.folder.extra_weights import extra_names, renumbered
from pipeline.models.folder.loading import load_model
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.folder.weight_files import stored_tensors
from tests import warm
from tests.conftest import launch, tiny_config, write_config
from tests.models.architectures import config_of
from tests.support import output_of
from tests.sweeps.families import tiny_fields

IDS = torch.arange(1, 13)[None]


def _mellum() -> tuple[Any, dict[str, Tensor]]:
    """A model with one module for multi-token prediction, and the module's tensors by their names in folders."""
    modules = {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["dense"]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_fields("mellum"), **modules))
    names = {"layers.0.": "", "mtp_block.": "layers.0.", "eh_proj": "fc", "post_norm": "norm"}
    names |= {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    own = {name: value for name, value in MtpModel(model, 1).state_dict().items() if name.startswith("layers.0.")}
    rename = partial(reduce, lambda name, pair: re.sub(f"^{pair[0]}", pair[1], name), names.items())
    return model, {f"mtp.{rename(name)}": value.clone() for name, value in own.items()}


def _deepseek() -> tuple[Any, dict[str, Tensor]]:
    """A DeepSeek-V3 with fewer layers than published, whose extra layer follows its own as `model.layers.3.*`."""
    model = AutoModelForCausalLM.from_config(config_of("deepseek_v3", vocab_size=512))
    last = "model.layers.2."
    extra = {name: value.clone() + 0.5 for name, value in model.state_dict().items() if name.startswith(last)}
    extra = {name.replace(last, "model.layers.3."): value for name, value in extra.items()}
    return model, extra | {"model.layers.3.eh_proj.weight": torch.ones(32, 64, dtype=torch.bfloat16)}


def train_a_step(tokens: Path, work: Path, **section: Any) -> str:
    """Trains section `model` in work/run for one step, and returns what the run said."""
    config = tiny_config(tokens, work / "run", model=section, engine="torch", evaluation={"samples": 0})
    config["run"] |= {"steps": 1, "checkpoint_every": 1}
    config.pop("scheduler")
    return " ".join(launch("train.py", write_config(work / "c.json", config)).split())


MADE = {"mellum": _mellum, "deepseek_v3": _deepseek}


@pytest.fixture(scope="module", params=list(MADE))
def made(request: pytest.FixtureRequest, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    model, extra = MADE[request.param]()
    folder = tmp_path_factory.mktemp(request.param) / "model"
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tokens / "tokenizer").save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, extra


@pytest.fixture(scope="module")
def run_dir(made: Any, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("run")
    said = train_a_step(tokens, work, path=str(made[0]))
    assert f"{len(made[1])} tensors that the language model does not use are not trained" in said
    return work / "run"


def _same(folder: Path, extra: dict[str, Tensor]) -> bool:
    every = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    same = {name: torch.equal(every[name], value) and every[name].dtype == value.dtype for name, value in extra.items()}
    return all(same.values())


def test_an_export_has_them_unchanged_beside_the_trained_weights(
    made: Any, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, extra = made
    said = output_of(warm.run("-m", "pipeline", "export", run_dir, tmp_path / "out"))
    assert f"{len(extra)} tensors as they were before the training" in said
    assert _same(tmp_path / "out", extra)
    assert f"{len(extra)} tensors that the language model does not use" in (tmp_path / "out/README.md").read_text()
    trained, config = ModelFolder.open(tmp_path / "out"), json.loads((tmp_path / "out/config.json").read_text())
    assert trained.tensors.keys() == ModelFolder.open(folder).tensors.keys()
    assert not _same(tmp_path / "out", {"lm_head.weight": load_file(folder / "model.safetensors")["lm_head.weight"]})
    assert 1 in (config.get("num_nextn_predict_layers"), config.get("num_mtp_layers"))
    capsys.readouterr()
    model = load_model(tmp_path / "out")
    assert f"{len(extra)} tensors that the language model does not use are not loaded" in capsys.readouterr().err
    if "mtp.fc.weight" in extra:  # transformers finds them only under these names
        drafted = model.generate(IDS, max_new_tokens=6, do_sample=False, use_mtp=True)
        assert torch.equal(drafted, model.generate(IDS, max_new_tokens=6, do_sample=False))


def test_a_folder_that_has_moved_is_asked_for_and_another_is_refused(made: Any, run_dir: Path, tmp_path: Path) -> None:
    folder, extra = made
    checkpoint, moved = find_checkpoint(run_dir), tmp_path / "moved"
    shutil.move(folder, moved)
    try:
        with pytest.raises(DataError, match=r"no such directory\n.*--extra-weights FOLDER"):
            export(checkpoint, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        export(checkpoint, tmp_path / "out", extra=str(moved))
        assert _same(tmp_path / "out", extra)
    finally:
        shutil.move(moved, folder)
    export(checkpoint, tmp_path / "without", extra="drop")
    assert not ModelFolder.open(tmp_path / "without").extra
    assert load_model(tmp_path / "without").config.num_mtp_layers == 0  # 1 is the default
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    with pytest.raises(DataError, match="no longer the folder"):
        export(checkpoint, tmp_path / "again", extra=str(other))


def test_quantize_keeps_them_unquantized(made: Any, tokens: Path, tmp_path: Path) -> None:
    folder, extra = made
    data = {"path": str(tokens), "sequence_length": 32, "batch_size": 8}
    config = {"model": str(folder), "output": str(tmp_path / "small"), "scheme": "W8A16", "data": data}
    path = write_config(tmp_path / "c.json", {**config, "consumers": ["transformers"]})
    done = warm.run(warm.ROOT / "pipeline/quantize.py", "--config", path)
    assert done.returncode == 0, done.stderr
    line = f"{len(extra)} tensors that the language model does not use are written as they are"
    assert line in done.stderr
    assert _same(tmp_path / "small", extra)
    packed, card = ModelFolder.open(tmp_path / "small"), (tmp_path / "small/README.md").read_text()
    assert "are those of the model from which this one was made, unchanged" in card
    assert any(name.endswith("weight_packed") for name in packed.tensors)
    assert packed.extra.keys() == extra.keys()


def test_pruning_refuses_them_by_name(made: Any, tokens: Path, tmp_path: Path) -> None:
    data = {"path": str(tokens), "sequence_length": 32}
    config = {"model": str(made[0]), "output": str(tmp_path / "small"), "target": {"parameters": 1e4}, "data": data}
    with pytest.raises(ConfigError, match=rf"{len(made[1])} tensors of layers that predict more"):
        prepare_pruning(parse(PruneConfig, config))


def test_layers_that_a_shortened_config_does_not_count_are_told_from_extra_ones(tmp_path: Path) -> None:
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(5)] + ["model.mtp_block.0.norm.weight"]
    config = {"num_hidden_layers": 3, "model_type": "deepseek_v3"}
    assert extra_names({**config, "num_nextn_predict_layers": 1}, names) == {names[3], names[5]}
    assert extra_names(config, names) == {names[3], names[5]}  # 1 is the default, which transformers does not write
    assert extra_names({**config, "model_type": "llama"}, names) == {names[5]}
    assert not extra_names({**config, "num_nextn_predict_layers": 1}, ["vision_tower.layers.3.norm.weight"])
    assert renumbered(names[3], by=-1) == names[2]
    assert renumbered("model.mtp.layers.0.norm.weight", by=-1) == "model.mtp.layers.0.norm.weight"
    config_of("llama", vocab_size=64).save_pretrained(tmp_path)
    AutoModelForCausalLM.from_config(config_of("llama", vocab_size=64, num_hidden_layers=4)).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 2}))
    model = build_meta(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32, attn_implementation="sdpa")
    with pytest.raises(DataError, match=r"\"num_hidden_layers\": 4 .*keep_layers \[0, 1\]"):
        FromSafetensors(tmp_path, model=model)


def test_the_extra_layer_moves_behind_the_layers_that_a_run_keeps(made: Any, tokens: Path, tmp_path: Path) -> None:
    kept = [0, 2] if "mtp.fc.weight" not in made[1] else [0, 1, 3]
    train_a_step(tokens, tmp_path, path=str(made[0]), keep_layers=kept)
    export(find_checkpoint(tmp_path / "run"), tmp_path / "out")
    moved = {renumbered(name, by=-1): value for name, value in made[1].items()}
    assert _same(tmp_path / "out", moved)
    assert ModelFolder.open(tmp_path / "out").extra.keys() == moved.keys()


def test_weights_in_fp8_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    name = "mtp.fc.weight"
    stored = {name: torch.full((2, 4), 3.0).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.tensor([[0.5]])}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ((read, value),) = stored_extras(tmp_path, stored_tensors(tmp_path), [name], dtype=torch.bfloat16)
    assert read == name
    assert torch.equal(value, torch.full((2, 4), 1.5, dtype=torch.bfloat16))
