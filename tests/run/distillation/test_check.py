"""`headrace check` of a distillation: the teacher's memory per rank, layouts in which it fits, the control run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from foundation.directory import read_manifest
from foundation.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from pipeline.run.prepare import prepare
from pipeline.runtime.metrics.journal import read_rows
from tests import warm
from tests.conftest import launch, losses, tiny_config, write_config
from tests.evaluation.heldout.small import make_tokens
from tests.support import output_of
from tests.warm import run


@pytest.fixture(scope="module")
def config(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distillation from a teacher of 8 layers of 790k parameters."""
    work = tmp_path_factory.mktemp("check")
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "vocab_size": 512}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).save_pretrained(work / "teacher")
    made = tiny_config(tokens, work / "run", engine="torch", distill={"teacher": str(work / "teacher")})
    return write_config(work / "c.json", made)


def check(config: Path, *words: str) -> dict[str, Any]:
    """What `headrace check --json` prints, of 4 processes."""
    said = output_of(warm.run("-m", "pipeline", "check", "--config", config, "--json", "--processes", "4", *words))
    found: dict[str, Any] = json.loads(said)
    return found


def test_a_teacher_takes_its_weights_on_every_rank_and_sharded_a_share_of_its_layers(config: Path) -> None:
    whole, sharded = check(config), check(config, "--set", "distill.shard_teacher=true")
    layer = 4 * (4 * 256 * 256 + 3 * 256 * 768 + 2 * 256)
    rest = 4 * (2 * 512 * 256 + 256)
    logits = whole["teacher"]["chunk_bytes"]
    assert logits == 2 * 32 * 512 * (4 + 3 * 4)
    assert whole["teacher"]["bytes"] == 8 * layer + rest + logits
    assert sharded["teacher"]["bytes"] == 8 * layer // 4 + 2 * layer + rest + logits


def test_a_teacher_that_does_not_fit_is_refused_with_the_layouts_that_would(config: Path) -> None:
    found = check(config)
    own, teacher = found["memory"]["peak"], found["teacher"]["bytes"]
    assert check(config, "--memory", f"{(own + teacher) / 1e6 + 0.1:.2f}MB")["memory_fit"]["fits"]
    arguments = ("--config", config, "--processes", "4", "--memory", f"{(own + 0.7 * teacher) / 1e6:.2f}MB")
    done = warm.run("-m", "pipeline", "check", *arguments, merged=True)
    assert done.returncode == 2
    assert "distill.teacher" in done.stdout
    remedy = done.stdout.partition("try: ")[2]
    assert "distill.shard_teacher true or parallel.tp 2 or distill.logits" in remedy
    smaller = ("--config", config, "--processes", "4", "--memory", f"{(own + 0.38 * teacher) / 1e6:.2f}MB")
    assert "data ranks or more" in warm.run("-m", "pipeline", "check", *smaller, merged=True).stdout


def test_matching_takes_the_teachers_features_gradients_and_a_relation_of_some_rows(config: Path) -> None:
    """The student is 48 wide with 4 and 2 heads of 12, the teacher 256 with 4 and 4 of 64; 2 x 32 tokens, fp32."""
    hidden = check(config, "--set", "distill.hidden_states={}")["matching"]["bytes"]
    kept = 2 * 64 * (4 * 2 * 48 + 4 * 256)
    assert hidden == kept + 2 * 4 * 64 * 32 + 4 * 64 * (48 + 256)
    attentions = check(config, "--set", "distill.attentions={}")["matching"]["bytes"]
    features, of_teacher = 48 + 24 + 24, 3 * 256
    assert attentions == 64 * (4 * 2 * features + 4 * of_teacher) + 6 * 4 * 64 * 32 * 4
    recomputed = ("--set", "distill.attentions={}", "--set", "memory.activation_checkpointing=full")
    assert check(config, *recomputed)["matching"]["bytes"] == attentions + 64 * 4 * features
    assert "matching" not in check(config)


@pytest.mark.parametrize(("teacher", "student", "key"), [(448, 384, "distill.teacher"), (384, 448, "model.path")])
def test_the_command_that_a_refusal_prints_makes_padded_vocabularies_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: int, student: int, key: str
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for rows in (teacher, student):
        LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=rows)).save_pretrained(tmp_path / str(rows))
    tokens = make_tokens(tmp_path / "tokens")
    config = tiny_config(tokens, tmp_path / "run", engine="torch", zero_optimization={"stage": 0})
    config |= {"model": {"path": str(tmp_path / str(student))}, "distill": {"teacher": str(tmp_path / str(teacher))}}
    path = write_config(tmp_path / "c.json", config)
    with pytest.raises(ConfigError, match=f"the teacher has {teacher} ids, the student {student}") as refused:
        prepare(resolve(load_config(path), world_size=1))
    printed = re.search(r'python -c "(.*)", and set (.*) to CUT', refused.value.remedy)
    assert printed is not None
    assert printed[2] == key
    monkeypatch.chdir(tmp_path)
    exec(printed[1])
    assert prepare(resolve(load_config(path, [f"{key}=CUT"]), world_size=1)).teacher is not None


def control(config: Path, *words: str) -> str:
    return output_of(run("-m", "pipeline", "distill", "--control", "--config", config, *words, merged=True))


@pytest.mark.integration
def test_the_control_is_the_run_of_headrace_train_without_a_teacher_and_both_losses_are_printed(
    teacher: Path, tokens: Path, tmp_path: Path
) -> None:
    plain = tiny_config(tokens, tmp_path / "run", engine="torch")
    plain["run"] |= {"steps": 10, "checkpoint_every": 10}
    config = write_config(tmp_path / "c.json", {**plain, "distill": {"teacher": str(teacher)}})
    assert "distilled" not in control(config)  # there is nothing to compare with yet
    said = launch("distill.py", config)
    launch("train.py", write_config(tmp_path / "plain.json", plain), f"run.dir={tmp_path / 'plain'}")
    assert losses(tmp_path / "run-control") == losses(tmp_path / "plain")
    assert losses(tmp_path / "run") != losses(tmp_path / "plain")
    ends = [read_rows(tmp_path / name, kind="eval")[-1]["loss"] for name in ("run", "run-control")]
    distilled, controlled = re.findall(r"distilled (\d+\.\d+), control (\d+\.\d+)", said)[0]
    assert [float(distilled), float(controlled)] == pytest.approx(ends, abs=5e-5)
    assert "distill.teacher" not in read_manifest(tmp_path / "run-control", kind="run").parents
    assert json.loads((tmp_path / "run-control/manifest.json").read_text())["config"]["distill"] is None


def test_a_control_of_what_is_no_distillation_is_refused(tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    done = run("-m", "pipeline", "distill", "--control", "--config", config, merged=True)
    assert done.returncode == 2
    assert "--control" in done.stdout
    assert not (tmp_path / "run-control").exists()
