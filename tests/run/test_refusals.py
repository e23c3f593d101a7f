"""Law 7 with real processes: bad input gets exit code 2, one clear error, and no output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import launch, make_tokens, start, tiny_config, write_config


def refusal(tmp_path: Path, config: dict[str, object], *sets: str, script: str = "train.py", processes: int = 1) -> str:
    """What an entry point says when it refuses a config. No run directory may be there afterwards."""
    path = write_config(tmp_path / "c.json", config)
    done = start(script, path, *sets, processes=processes)
    assert done.returncode != 0
    if processes == 1:
        assert done.returncode == 2, done.stdout
        assert "Traceback" not in done.stdout
    return done.stdout


def test_a_batch_that_does_not_divide_is_refused_before_any_process_group(tokens: Path, tmp_path: Path) -> None:
    said = refusal(tmp_path, tiny_config(tokens, tmp_path / "run"), "train_batch_size=9", processes=2)
    assert "train_batch_size = 9" in said
    assert "use 8 or 12" in said
    assert not (tmp_path / "run").exists()


def test_a_tokens_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, tiny_config(tmp_path / "nowhere", tmp_path / "run"))
    assert "no such directory" in said
    assert "headrace prep" in said
    assert not (tmp_path / "run").exists()


# rank 0 alone has seen it; torchrun gives the rank that waits for the other 30 s to end
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.integration)])
def test_a_truncated_token_file_is_refused_and_ends_all_ranks(tokens: Path, tmp_path: Path, processes: int) -> None:
    copy = shutil.copytree(tokens, tmp_path / "copy")
    path = copy / "train/shard-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    assert "truncated" in refusal(tmp_path, tiny_config(copy, tmp_path / "run"), processes=processes)
    assert processes > 1 or not (tmp_path / "run").exists()


def test_a_fallback_layout_that_the_model_cannot_have_is_refused_early(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch", train_micro_batch_size_per_gpu=1)
    config["launch"] = {"fallback_layouts": [{}, {"pp": 4}]}  # the model has 2 layers
    said = refusal(tmp_path, config)
    assert "launch.fallback_layouts.1" in said
    assert "in this layout parallel.pp cannot be 4" in said
    assert "{'pp': 4}" in said
    assert not (tmp_path / "run").exists()


def test_a_layout_that_the_model_cannot_have_is_refused_despite_a_fallback(tokens: Path, tmp_path: Path) -> None:
    keys = {"train_micro_batch_size_per_gpu": 1, "parallel": {"pp": 4}}  # the model has 2 layers
    config = tiny_config(tokens, tmp_path / "run", engine="torch", **keys)
    config["launch"] = {"fallback_layouts": [{}]}
    said = refusal(tmp_path, config)
    assert "error: parallel.pp = 4" in said
    assert "or remove" not in said
    assert "in this layout" not in said
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_model_data_or_seed_is_refused(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch")
    config["run"]["steps"] = 5
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    launch("train.py", write_config(tmp_path / "first.json", config))
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    said = refusal(tmp_path, config, "model.config.num_hidden_layers=3")
    assert "model.config.num_hidden_layers: was 2, now 3" in said
    said = refusal(tmp_path, config, "run.seed=8", "optimizer.params.lr=1e-4")
    assert "run.seed: was 7, now 8" in said
    assert "optimizer.params.lr: was 0.003, now 0.0001" in said
    other = make_tokens(tmp_path, [Path(json.__file__).parent.parent / "asyncio"])
    said = refusal(tmp_path, config, f"data.sources.0.path={other}")
    assert "fingerprint): was" in said
    said = refusal(tmp_path, config, "run.resume=never")
    assert "run.resume is never" in said
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_the_directory_of_another_stage_is_not_trained_into(tokens: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tokens, tmp_path / "copy")
    before = (copy / "manifest.json").read_bytes()
    said = refusal(tmp_path, tiny_config(tokens, copy, engine="torch"))
    assert "holds a 'tokens', but a 'run' is needed" in said
    assert (copy / "manifest.json").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    said = refusal(tmp_path, tiny_config(tokens, tmp_path / "mine", engine="torch"))
    assert "files that no run has put there" in said
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_moved_dataset_and_more_steps_are_allowed_and_fewer_than_done_refused(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch")
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    path = write_config(tmp_path / "c.json", config)
    launch("train.py", path, "run.steps=4")
    moved = shutil.copytree(tokens, tmp_path / "moved")
    assert "resuming after step 4" in launch("train.py", path, "run.steps=6", f"data.sources.0.path={moved}")
    said = refusal(tmp_path, config, "run.steps=3")
    assert "is of step 6 already" in said


def test_a_damaged_manifest_of_the_newest_checkpoint_blocks_no_older_one(tokens: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    launch("train.py", path)
    (tmp_path / "run/checkpoints/step-00000020/manifest.json").write_text("")
    (tmp_path / "run/checkpoints/.step-00000007.partial").mkdir()
    said = launch("train.py", path)
    assert "step-00000020 is damaged" in said
    assert "resuming after step 15" in said
    left = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert left == ["latest", "step-00000015", "step-00000020"]


def test_a_model_of_another_tokenizer_is_refused(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch")
    config["run"]["steps"] = 5
    config.pop("scheduler")
    launch("train.py", write_config(tmp_path / "first.json", config))
    model = export(tmp_path / "run", tmp_path / "model")
    other = make_tokens(tmp_path, [Path(json.__file__).parent.parent / "asyncio"])
    student = tiny_config(other, tmp_path / "student", model={"path": str(model)})
    said = refusal(tmp_path, student)
    assert "model.path" in said
    assert "its tokenizer is not the one the dataset was made with" in said
    distilled = tiny_config(other, tmp_path / "student", distill={"teacher": str(model)})
    said = refusal(tmp_path, distilled, script="distill.py")
    assert "distill.teacher" in said


@pytest.mark.parametrize(
    ("script", "words"), [("train.py", "pipeline/distill.py"), ("distill.py", "pipeline/train.py")]
)
def test_the_wrong_entry_point_names_the_right_one(tokens: Path, tmp_path: Path, script: str, words: str) -> None:
    config = tiny_config(tokens, tmp_path / "run")
    if script == "train.py":
        config["distill"] = {"teacher": "somewhere"}
    assert words in refusal(tmp_path, config, script=script)


def test_a_run_directory_that_cannot_be_written_is_refused(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refusal(tmp_path, tiny_config(tokens, tmp_path / "file/run", engine="torch"))
    assert "run.dir" in said
    assert "cannot be written" in said


def test_a_loss_that_is_not_finite_ends_the_run_and_spares_the_checkpoint(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch", gradient_clipping=0.0)
    config["optimizer"]["params"]["lr"] = 1e30
    config["run"]["checkpoint_every"] = 1
    config.pop("scheduler")
    said = refusal(tmp_path, config)
    assert "is nan" in said or "is inf" in said
    assert "optimizer.params.lr" in said


def export(run: Path, out: Path) -> Path:
    assert warm.run("-m", "pipeline", "export", run, out).returncode == 0
    return out
