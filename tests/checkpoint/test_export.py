"""Export: a folder that transformers can load with the same logits, or no folder at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from foundation.directory import read_manifest
from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.checkpoint.export import export as export_module
from pipeline.models.construction import materialize as model_materialize
from tests import warm
from tests.conftest import launch, tiny_config, write_config
from tests.models.architectures import config_of
from tests.support import output_of, refusal_of


@pytest.fixture(scope="module")
def run_dir(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a tied model, ZeRO-3 on two processes."""
    work = tmp_path_factory.mktemp("run")
    config = tiny_config(tokens, work / "run")
    config["model"]["config"]["tie_word_embeddings"] = True
    config["run"]["steps"] = 6
    config.pop("scheduler")
    launch("train.py", write_config(work / "c.json", config), processes=2)
    return work / "run"


def export(*arguments: object) -> subprocess.CompletedProcess[str]:
    return warm.run("-m", "pipeline", "export", *arguments)


USER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("def loads(text):\\n    return 1", return_tensors="pt").input_ids
with torch.no_grad():
    loss = model(input_ids=ids, labels=ids).loss.item()
made = model.generate(ids, max_new_tokens=3, do_sample=False)
print(json.dumps({"loss": loss, "text": tokenizer.decode(ids[0]), "new": made.shape[1] - ids.shape[1]}))
"""


@pytest.mark.integration
def test_transformers_loads_the_exported_model_and_its_tokenizer(run_dir: Path, tmp_path: Path) -> None:
    assert "largest logit difference to the trained model 0" in output_of(export(run_dir, tmp_path / "model"))
    user = subprocess.run(
        [sys.executable, "-c", USER, str(tmp_path / "model")], capture_output=True, text=True, check=True
    )
    result = json.loads(user.stdout)
    # nobody gave it: what was trained, not the 2048 of the model that was built
    assert json.loads((tmp_path / "model/config.json").read_text())["max_position_embeddings"] == 32
    assert result["text"] == "def loads(text):\n    return 1"
    assert result["loss"] < 6.5  # untrained it would be log(512) = 6.24 on average; a wrong head gives much more
    manifest = read_manifest(tmp_path / "model", kind="model")
    checkpoint = read_manifest(run_dir / "checkpoints/step-00000006", kind="checkpoint")
    assert manifest.parents["checkpoint"]["fingerprint"] == checkpoint.fingerprint
    mode = (tmp_path / "model/model.safetensors").stat().st_mode & 0o777
    assert mode == (tmp_path / "model/config.json").stat().st_mode & 0o777


def test_the_exported_model_has_the_held_out_loss_of_the_run(run_dir: Path, tokens: Path, tmp_path: Path) -> None:
    assert export(run_dir, tmp_path / "model").returncode == 0
    command = ("-m", "pipeline", "eval", tmp_path / "model", "--data", tokens)
    done = warm.run(*command, "--sequence-length", 32, "--json")
    exported = json.loads(done.stdout)
    row = next(json.loads(r) for r in (run_dir / "metrics.jsonl").read_text().splitlines() if '"eval"' in r)
    # training evaluated 16 windows from the start, this is the whole split: the bound only tells one model from another
    assert exported["loss_nats"] == pytest.approx(row["loss"], rel=0.05)


def test_weights_are_split_into_files_of_bounded_size(run_dir: Path, tmp_path: Path) -> None:
    code = (
        "import pipeline.checkpoint.export.export as e, sys; from pathlib import Path;"
        "import pipeline.checkpoint.export.write_safetensors as w; w.SHARD_BYTES = 60_000;"
        "from pipeline.checkpoint.export.find import find_checkpoint;"
        "e.export(find_checkpoint(Path(sys.argv[1])), Path(sys.argv[2]))"
    )
    assert warm.run("-c", code, run_dir, tmp_path / "cut").returncode == 0
    assert export(run_dir, tmp_path / "whole").returncode == 0
    files = sorted((tmp_path / "cut").glob("model-*.safetensors"))
    assert len(files) > 2
    parts = {name: tensor for file in files for name, tensor in load_file(file).items()}
    whole = load_file(tmp_path / "whole/model.safetensors")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    output_of(warm.run("-c", USER, tmp_path / "cut"))


def test_bf16_weights_are_written_on_request(run_dir: Path, tmp_path: Path) -> None:
    assert export(run_dir, tmp_path / "model", "--dtype", "bf16").returncode == 0
    assert {t.dtype for t in load_file(tmp_path / "model/model.safetensors").values()} == {torch.bfloat16}


def test_an_export_with_other_logits_than_the_trained_model_is_refused(run_dir: Path, tmp_path: Path) -> None:
    code = """
import sys
import weakref
from pathlib import Path
from typing import Any
import pipeline.checkpoint.export.export as e
import pipeline.checkpoint.export.write_safetensors as w
from pipeline.checkpoint.export.find import find_checkpoint
write = w.save_file
def damage(tensors, *arguments, **named):
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].roll(1, 0)
    write(tensors, *arguments, **named)
w.save_file = damage
e.export(find_checkpoint(Path(sys.argv[1])), Path(sys.argv[2]))
"""
    done = warm.run("-c", code, run_dir, tmp_path / "model")
    assert "the export is refused" in done.stderr
    assert list(tmp_path.iterdir()) == []  # the staging directory is deleted, too


def test_an_impossible_export_is_refused_with_exit_code_2(run_dir: Path, tmp_path: Path) -> None:
    assert export(run_dir, tmp_path / "model").returncode == 0
    again = export(run_dir, tmp_path / "model")
    assert (again.returncode, "--replace" in again.stderr) == (2, True)
    assert export(run_dir, tmp_path / "model", "--replace").returncode == 0
    missing = export(tmp_path / "nowhere", tmp_path / "other")
    assert (missing.returncode, "no such directory" in missing.stderr) == (2, True)
    no_tokenizer = export(run_dir, tmp_path / "other", "--tokenizer", tmp_path)
    assert (no_tokenizer.returncode, "no tokenizer_config.json" in no_tokenizer.stderr) == (2, True)
    output_of(export(run_dir, tmp_path / "again", "--tokenizer", tmp_path / "model"))
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    damaged = copy / "checkpoints/step-00000006/__0_0.distcp"
    os.truncate(damaged, damaged.stat().st_size - 5000)
    assert "Traceback" not in refusal_of(export(copy, tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_the_gate_never_holds_two_whole_models(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one whose modules refer to each other in a cycle, which is freed by the garbage collector only."""
    original = AutoModelForCausalLM.from_pretrained
    loaded: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def load(*arguments: Any, **options: Any) -> Any:
        model = original(*arguments, **options)
        model.itself = [model]
        loaded.extend(weakref.ref(parameter) for parameter in model.parameters())
        return model

    def materialize(*arguments: Any, **options: Any) -> None:
        alive.append(sum(each() is not None for each in loaded))
        model_materialize.materialize(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(export_module, "materialize", materialize)
    export_module.export(Checkpoint(run_dir / "checkpoints/step-00000006", 6), tmp_path / "model")
    assert loaded
    assert alive == [0]


def test_a_deepseek_config_names_its_router_as_published_ones_do(tmp_path: Path) -> None:
    """vLLM reads these fields, and transformers, which knows one kind of router, does not write them."""
    config = config_of("deepseek_v3")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    export_module._write_config(config, model, tmp_path, torch.bfloat16, trained_positions=None)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["topk_method"], written["scoring_func"]) == ("noaux_tc", "sigmoid")


def test_an_export_keeps_the_ends_of_generation_of_the_model_that_was_continued(tokens: Path, tmp_path: Path) -> None:
    folder = tmp_path / "given"
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=512, **sizes, eos_token_id=5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    generation = {"eos_token_id": [5, 7], "pad_token_id": 3, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    fields = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_novel.NovelConfig"}
    (folder / "config.json").write_text(json.dumps({**fields, "auto_map": code}))
    run_config = tiny_config(tokens, tmp_path / "run", model={"path": str(folder)}, engine="torch")
    run_config["run"]["steps"] = 1
    run_config.pop("scheduler")
    launch("train.py", write_config(tmp_path / "c.json", run_config))
    shutil.rmtree(folder)  # the checkpoint knows
    assert "logit difference" in output_of(export(tmp_path / "run", tmp_path / "model"))
    end = read_manifest(tokens, kind="tokens").details["tokenizer"]["eos_id"]
    found = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert found == {**generation, "eos_token_id": [5, 7, end]}  # the training's documents end by another token
    assert "auto_map" not in json.loads((tmp_path / "model/config.json").read_text())
