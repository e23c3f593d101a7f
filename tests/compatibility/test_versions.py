"""What earlier versions wrote is read by the code of today, which is used by its command lines only.

The directories are in `tests/fixtures`, whose README.md says what each of them is. Every test works on a copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import warm, warm_python
from tests.conftest import ROOT, losses

FIXTURES = ROOT / "tests" / "fixtures"
VERSIONS = ("v0.1", "v0.5")
JOB = ".tokens.job"
RUNS = ("run_deepspeed", "run_torch")
MODELS = ("model", "model_int8")


@pytest.fixture(params=VERSIONS)
def work(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a version's directories; paths in their configs and manifests are relative to it."""
    return copy_of(request.param, tmp_path)


def copy_of(version: str, folder: Path) -> Path:
    """Copies a version's directories into a folder."""
    copied = Path(shutil.copytree(FIXTURES / version, folder / version, symlinks=True))
    # the one key in these configs that has been renamed since: the old name is refused, with the new one
    config = copied / "run_torch.json"
    config.write_text(config.read_text().replace('"schedule":', '"curriculum":'))
    return copied


@pytest.fixture
def expected(work: Path) -> dict[str, Any]:
    """What the version itself had: losses of undisturbed runs, losses of the models, checksums of the job's output."""
    found: dict[str, Any] = json.loads((work / "expected.json").read_text())
    return found


@pytest.fixture
def stopped_job(work: Path, expected: dict[str, Any]) -> Path:
    """The folder of the job that was killed, with what git does not keep: times of files, and empty directories."""
    folder = work / "job_stopped"
    for name, mtime_ns in expected["job"]["mtime_ns"].items():
        os.utime(folder / name, ns=(mtime_ns, mtime_ns))
    for name in expected["job"]["empty_directories"]:
        (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


def data_prep(folder: Path, *words: str) -> str:
    """Runs `python -m data_prep` to its end and returns what it said."""
    done = warm.run("-m", "data_prep", *words, cwd=folder, merged=True, imported="data_prep")
    assert done.returncode == 0, done.stdout
    return done.stdout


def pipeline(folder: Path, *words: str) -> str:
    """Runs `python -m pipeline` to its end and returns its standard output."""
    done = warm.run("-m", "pipeline", *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder: Path, run: str, *sets: str) -> str:
    """Trains a run on two processes to its end and returns what was said."""
    overrides = [word for text in sets for word in ("--set", text)]
    words = [ROOT / "pipeline" / "train.py", "--config", f"{run}.json", *overrides]
    done = warm.run(*words, cwd=folder, processes=2, merged=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def by_step(values: dict[str, float], *, after: int = 0) -> dict[int, float]:
    """Losses of expected.json, of steps after `after`."""
    return {int(step): loss for step, loss in values.items() if int(step) > after}


def heldout_losses(run_dir: Path) -> dict[int, float]:
    """Step -> held-out loss, from a run's journal."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "eval"}


def heldout_loss(folder: Path, model: str) -> float:
    """What `python -m pipeline eval` finds for a model folder."""
    said = pipeline(folder, "eval", model, "--data", "tokens", "--sequence-length", "16", "--json")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return float(found["loss_nats"])


def sha256(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of the files of a directory, its manifest aside."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("version", VERSIONS)
def test_fixtures_are_as_they_were_written(version: str) -> None:
    # A change of line endings, or a file that git ignores, is found here and not as a failure of the code.
    folder = FIXTURES / version
    manifests = [path for path in folder.rglob("manifest.json") if json.loads(path.read_text())["files"]]
    assert len(manifests) == 8
    for path in manifests:
        listed = {name: entry["sha256"] for name, entry in json.loads(path.read_text())["files"].items()}
        found = sha256(path.parent)
        assert {name: found.get(name) for name in listed} == listed, path
    assert sorted(path.parent.name for path in (folder / "job_stopped" / JOB).glob("map/*/done.json"))


@pytest.mark.parametrize("name", ["tokens", "conversations"])
def test_a_tokens_directory_and_its_packing_are_read(name: str, work: Path) -> None:
    # Promise: verify and stats read tokens, loss masks and packings that an earlier version wrote.
    said = data_prep(work, "verify", name)
    assert f"{name}:" in said
    assert f"{name}/packed-16:" in said
    assert data_prep(work, "stats", name)


@pytest.mark.parametrize("name", ["tokens", "conversations"])
def test_a_finished_job_is_not_done_again(name: str, work: Path) -> None:
    # Promise: the same config finds the output of an earlier version to be its own, and leaves it alone.
    cleaning = json.loads((work / name / "manifest.json").read_text())["details"]["cleaning"]
    if cleaning is not None and cleaning["versions"]["unicode"] != unicodedata.unidata_version:
        pytest.skip("texts were cleaned with another version of Unicode, which makes another job")
    before = sha256(work / name), (work / name / "manifest.json").read_bytes()
    data_prep(work, "--config", f"{name}.json")
    assert (sha256(work / name), (work / name / "manifest.json").read_bytes()) == before


def test_a_packing_of_another_length_is_made_of_old_tokens(work: Path) -> None:
    # Promise: tokens of an earlier version can still be packed.
    data_prep(work, "pack", "tokens", "--length", "24")
    assert "tokens/packed-24:" in data_prep(work, "verify", "tokens")


def test_a_stopped_job_is_resumed_and_gives_the_bytes_of_an_undisturbed_one(
    stopped_job: Path, expected: dict[str, Any]
) -> None:
    # Promise: a job that an earlier version began is finished by this one. Map tasks that had finished are not executed
    # again, and the output has the bytes of a job that was never stopped.
    finished = expected["job"]["finished_map_tasks"]
    assert 0 < len(finished) < expected["job"]["map_tasks"]
    markers = [stopped_job / JOB / "map" / name / "done.json" for name in finished]
    before = [(marker.stat().st_ino, marker.stat().st_mtime_ns) for marker in markers]
    said = data_prep(stopped_job, "phase", "map", "--config", "corpus.json", "--task", "0", "--of", "1")
    assert [(marker.stat().st_ino, marker.stat().st_mtime_ns) for marker in markers] == before
    assert f"{len(finished)} of {expected['job']['map_tasks']} map tasks were finished before" in said
    data_prep(stopped_job, "--config", "corpus.json", "--workers", "1")
    assert sha256(stopped_job / "tokens") == expected["job"]["sha256"]
    manifest = json.loads((stopped_job / "tokens" / "manifest.json").read_text())
    assert manifest["fingerprint"] == expected["job"]["fingerprint"]
    assert not (stopped_job / JOB).exists()


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_resumed_and_follows_its_losses(run: str, work: Path, expected: dict[str, Any]) -> None:
    # Promise: a run that an earlier version began goes on from its checkpoint with the same config file, renamed keys
    # aside, on the curve of a run that was never stopped, and the journal is that of one run.
    said = train(work, run)
    assert "resuming after step 4" in said
    assert losses(work / run) == pytest.approx(by_step(expected["losses"][run]), rel=1e-5)
    assert heldout_losses(work / run) == pytest.approx(by_step(expected["heldout_losses"][run]), rel=1e-5)


def test_a_checkpoint_of_one_engine_is_resumed_by_the_other(work: Path, expected: dict[str, Any]) -> None:
    # Promise: a checkpoint belongs to no engine, in this version as in the one that wrote it.
    assert "resuming after step 4" in train(work, "run_deepspeed", "engine=torch")
    after = by_step(expected["losses"]["run_deepspeed"], after=4)
    found = losses(work / "run_deepspeed")
    assert {step: found[step] for step in after} == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_the_commands_that_look_into_a_run_read_it(run: str, work: Path) -> None:
    # Promise: progress, checkpoints and samples of a run of an earlier version are shown, and its checkpoint is whole.
    assert pipeline(work, "check", "--config", f"{run}.json", "--progress").split()[0] == "4"
    assert re.search(r"^\W+4 ", pipeline(work, "checkpoint", "ls", run), re.MULTILINE)
    assert pipeline(work, "checkpoint", "verify", run)
    assert pipeline(work, "samples", run, "--step", "3").strip()
    assert " of 8 (" in pipeline(work, "status", run)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_folder_has_the_loss_it_had(model: str, work: Path, expected: dict[str, Any]) -> None:
    # Promise: an exported and a quantized model of an earlier version are evaluated, with the same loss.
    assert heldout_loss(work, model) == pytest.approx(expected["model_losses"][model], rel=1e-6)


def test_a_checkpoint_is_exported(work: Path) -> None:
    # Promise: a checkpoint of an earlier version can be exported, and is the model that that version exported.
    pipeline(work, "export", "run_deepspeed", "exported")
    assert (work / "exported" / "model.safetensors").read_bytes() == (work / "model" / "model.safetensors").read_bytes()


def test_a_page_about_old_runs_and_a_model_is_written(work: Path) -> None:
    # Promise: a report takes journals, manifests and models of an earlier version.
    runs = [word for run in RUNS for word in ("--run", f"{run}={run}")]
    words = [*runs, "--model", "exported=model", "--data", "tokens", "--sequence-length", "16"]
    pipeline(work, "report", "report.html", *words)
    page = (work / "report.html").read_text()
    assert all(name in page for name in (*RUNS, "exported"))


def test_a_config_with_a_renamed_key_is_refused_with_the_new_name() -> None:
    # Promise: a key that has another name since is not ignored, and the error says what to write.
    done = warm.run("-m", "pipeline", "check", "--config", "run_torch.json", "--rules-only", cwd=FIXTURES / "v0.1")
    assert done.returncode == 2
    assert "renamed to data.curriculum" in done.stderr


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a job script of a user's copy of `slurm/` of version 0.5 with the code of today, as Slurm would."""
    folder = copy_of("v0.5", tmp_path)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 '\n")
    scontrol.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{warm_python.folder()}:{os.environ['PATH']}"}
    env |= {"HEADRACE_ROOT": str(folder), "HEADRACE_VENV": "", "SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1"}

    def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", f"slurm/{script}", *words]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("pipeline.sbatch", "checkpoint", "verify", "run_torch"), "step-00000004"),
        (("data_prep.sbatch", "verify", "tokens"), "tokens/packed-16:"),
    ],
)
def test_job_scripts_that_a_user_has_copied_run(
    words: tuple[str, ...], printed: str, job: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    # Promise: entry points keep their names.
    done = job(*words)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_a_job_script_that_runs_a_module_by_its_old_name_is_told_the_new_one(
    job: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = job("join.sbatch", "--nodes", "n1=10.0.0.1", "--directory", "agents", "pipeline.train")
    assert done.returncode == 1
    assert "pipeline.elastic has moved to pipeline.cluster.elastic" in done.stderr


def test_a_run_is_resumed_with_the_config_of_its_submission(tmp_path: Path) -> None:
    # Promise: the config in `submissions/1/`, which has all that it extends and all overrides, is a config of today.
    work = copy_of("v0.5", tmp_path)
    config = work / "run_torch/submissions/1/configs/train.json"
    config.write_text(config.read_text().replace("/home/me/fixtures", str(work)))
    assert pipeline(work, "check", "--config", str(config), "--progress").split()[0] == "4"
