"""`headrace submit`, `headrace ladder --slurm` and `headrace status` on a real Slurm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from headrace.submission.snapshot import PACKAGES
from tests.conftest import ROOT, losses, tiny_config, write_config
from tests.virtual_cluster.cluster import VirtualCluster
from tests.virtual_cluster.slurm_run import NEEDS_SLURM, job_env, module_cluster

BIN = Path(sys.executable).parent
STEPS = 4
pytestmark = NEEDS_SLURM
cluster = module_cluster(nodes=4, cpus=1, gpus=1)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the code, which a test may change."""
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "clone" / name, symlinks=True, ignore=ignored)
    return tmp_path / "clone"


@pytest.mark.integration
def test_jobs_train_by_the_code_of_their_submission(cluster: VirtualCluster, clone: Path, tmp_path: Path) -> None:
    """Tokens by arrays, then a sweep of two elements of ZeRO-3 over two nodes each."""
    configs = whole_way(tmp_path)[:2]
    words = [*configs, "--nodes", "2", "--workers", "2", "--sweep", "run.seed=1,2"]
    submit(cluster, clone, tmp_path, *words)
    with pytest.raises(RuntimeError, match=r"jobs that write \S+/zero3 are queued or running: \d+"):
        submit(cluster, clone, tmp_path, *words)
    edit(clone, tmp_path)
    states = {job.name: job.state for job in cluster.wait_for_all(timeout_s=240)}
    assert (states["headrace-finish"], states["headrace-train"]) == ("COMPLETED", "COMPLETED"), logs(tmp_path)
    expected = on_one_machine(tmp_path, "train-0")
    assert list(expected) == list(range(1, STEPS + 1))
    # fp32: only the order of sums differs
    assert losses(tmp_path / "zero3/seed=1") == pytest.approx(expected, rel=1e-5)
    assert losses(tmp_path / "zero3/seed=2") != pytest.approx(expected, rel=1e-5)


@pytest.mark.sweep
def test_one_submission_leads_from_text_to_a_small_model(cluster: VirtualCluster, clone: Path, tmp_path: Path) -> None:
    """Tokens by arrays, ZeRO-3 over two nodes, a 3D layout over four, export, prune, distil, quantize."""
    submit(cluster, clone, tmp_path, *whole_way(tmp_path), "--nodes", "2,4", "--workers", "2")
    edit(clone, tmp_path)
    jobs = {job.name: job for job in cluster.wait_for_all(timeout_s=600) if job.element is None}
    names = ("finish", "train", "train-2", "export", "compress")
    assert {jobs[f"headrace-{name}"].state for name in names} == {"COMPLETED"}, logs(tmp_path)
    assert (jobs["headrace-train"].nodes, jobs["headrace-train-2"].nodes) == ("n[1-2]", "n[1-4]")
    assert {path.name for path in (tmp_path / "small").iterdir()} >= {"original", "pruned", "distilled", "q8_0"}
    recorded = json.loads((tmp_path / "zero3/submissions/1/submission.json").read_text())
    assert set(recorded["jobs"]) == {"data", "train", "train-2", "export", "compress"}

    expected = on_one_machine(tmp_path, "train-2")
    for name in ("zero3", "layout3d"):
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-5), name


@pytest.mark.integration
def test_what_slurm_would_refuse_leaves_nothing_behind(cluster: VirtualCluster, clone: Path, tmp_path: Path) -> None:
    configs = whole_way(tmp_path)
    before = len(cluster.jobs())
    (tmp_path / "site.toml").write_text('partition = "mian"\n')
    with pytest.raises(RuntimeError, match="did you mean 'main'"):
        submit(cluster, clone, tmp_path, *configs, "--site", "site.toml")
    with pytest.raises(RuntimeError, match=r"Slurm refuses the job: .*(node|Node)"):
        submit(cluster, clone, tmp_path, *configs, "--nodes", "8", "--set", "train_batch_size=16")  # it has four
    assert len(cluster.jobs()) == before
    assert not (tmp_path / "zero3").exists()


def edit(clone: Path, work: Path) -> None:
    """Changes the clone, the configs and the user's module while the jobs wait: what was submitted runs."""
    (work / "own_part.py").write_text("raise SystemExit('an edit of the module reached a queued job')\n")
    (clone / "pipeline/train.py").write_text("raise SystemExit('an edit of the clone reached a queued job')\n")
    (clone / "pipeline/__main__.py").unlink()
    for name in ("corpus", "zero3", "layout3d", "student"):
        (work / f"{name}.json").write_text("{}")


def logs(work: Path) -> str:
    """The ends of all logs, for a failure."""
    files = [*work.glob("tokens.logs/1/*"), *work.glob("zero3/submissions/1/logs/*")]
    return "\n".join(path.read_text()[-3000:] for path in sorted(files))


def submit(cluster: VirtualCluster, clone: Path, work: Path, *words: str) -> str:
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    code = {"PYTHONPATH": str(clone), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "headrace", "submit", *words]
    return cluster.run(*command, cwd=work, env=env | code, timeout_s=120)


def whole_way(work: Path) -> list[str]:
    """Writes the configs of the whole way; returns their names in order."""
    text = work / "text"
    text.mkdir()
    for file in sorted(Path(sysconfig.get_path("stdlib"), "email").glob("*.py")):
        shutil.copy(file, text / file.name)
    corpus = {
        "output": "tokens",
        "sources": [{"path": "text", "include": ["*.py"]}],
        "tokenizer": {"train": "bpe", "vocab_size": 384},
        "heldout_fraction": 0.25,
        "task_bytes": 20_000,
    }
    shape = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    training: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "model": {"config": {**shape, "num_attention_heads": 2, "num_key_value_heads": 2}},
        "data": {"sources": [{"path": "tokens"}], "sequence_length": 32},
        "run": {"steps": STEPS, "seed": 1},
        "evaluation": {"samples": 8},
    }
    (work / "own_part.py").write_text("from pipeline.run.hooks.hook import Hook\n\ndef make(_):\n    return Hook()\n")
    training["callbacks"] = ["own_part:make"]
    zero3 = {**training, "zero_optimization": {"stage": 3}, "run": {**training["run"], "dir": "zero3"}}
    layout3d = {**training, "engine": "torch", "parallel": {"pp": 2, "tp": 2}}
    student = {**training, "model": {"config": "auto", "path": "set"}, "distill": {"teacher": "set"}}
    recipe = {
        "model": "layout3d",
        "output": "small",
        "data": {"path": "tokens", "sequence_length": 32, "max_tokens": 500},
        "prune": {"target": {"shape": {"num_hidden_layers": 1}}, "calibration": {"samples": 2}},
        "distill": {"config": "student.json", "overrides": ["run.steps=1"]},
        "quantize": {"q8_0": {"scheme": "Q8_0"}},
        "consumers": [],
    }
    write_config(work / "corpus.json", corpus)
    write_config(work / "zero3.json", zero3)
    write_config(work / "layout3d.json", {**layout3d, "run": {**training["run"], "dir": "layout3d"}})
    write_config(work / "student.json", {**student, "run": {**training["run"], "dir": "set"}})
    write_config(work / "compress.json", recipe)
    return ["corpus.json", "zero3.json", "layout3d.json", "compress.json"]


def on_one_machine(work: Path, stage: str, *, steps: int = STEPS) -> dict[int, float]:
    """The losses of a stage's training in one plain process of the native engine."""
    config = json.loads((work / f"zero3/submissions/1/configs/{stage}.json").read_text())
    config |= {"engine": "torch", "zero_optimization": {"stage": 0}, "parallel": {}}
    config["run"] |= {"dir": "one_machine", "steps": steps}
    config.pop("callbacks")
    path = write_config(work / "one_machine.json", config)
    subprocess.run([sys.executable, "-m", "pipeline.train", "--config", str(path)], cwd=work, check=True)
    return losses(work / "one_machine")


@pytest.mark.sweep
def test_the_arrays_of_a_ladder_end_with_its_prediction(cluster: VirtualCluster, tokens: Path, tmp_path: Path) -> None:
    fields = tiny_config(tokens, tmp_path / "run", engine="reference", zero_optimization={"stage": 0})
    run = {"dir": str(tmp_path / "run"), "steps": 300, "seed": 7}
    config = write_config(tmp_path / "large.json", {**fields, "run": run})
    words = ["--rungs", "3", "--smallest", "0.1", "--largest", "0.6", "--budgets", "0.5,1", "--learning-rates", "1"]
    command = [sys.executable, "-P", "-m", "pipeline", "ladder", "--config", str(config), *words]
    printed = cluster.run(*command, "--tolerance", "0.5", "--slurm", cwd=ROOT, env=job_env(), timeout_s=240)
    assert "an array of 6" in printed, printed
    output = tmp_path / "run-ladder"
    jobs = cluster.wait_for_all(timeout_s=900)
    logs = "\n".join(path.read_text()[-1500:] for path in sorted((output / "logs").glob("slurm-*")))
    assert {job.state for job in jobs} == {"COMPLETED"}, logs
    assert len([job for job in jobs if job.name == "headrace-ladder-runs"]) == 6
    results = json.loads((output / "results.json").read_text())
    assert len(results["runs"]) == 6
    assert results["prediction"] is not None, logs


def test_a_waiting_job_says_why_and_is_found_by_its_run_directory(cluster: VirtualCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "c.json", {"run": {"dir": str(run_dir)}})
    options = ["--nodes=1", "--hold", f"--output={tmp_path}/out"]
    held = cluster.sbatch("slurm/train.sbatch", str(config), options=options, cwd=ROOT, env=job_env())
    options = ["--nodes=1", "--begin=now+1hour", f"--output={tmp_path}/out"]
    more = ("--set", f"run.dir={run_dir}-2")
    later = cluster.sbatch("slurm/train.sbatch", str(config), *more, options=options, cwd=ROOT, env=job_env())
    try:
        for given in (run_dir, config):
            shown = cluster.run("python", "-m", "headrace", "status", str(given), cwd=ROOT, env=job_env())
            assert f"{held} waits: held: 'scontrol release JOB' lets it go (JobHeldUser)" in shown
        shown = cluster.run("python", "-m", "headrace", "status", f"{run_dir}-2", "--json", cwd=ROOT, env=job_env())
        [job] = json.loads(shown)["jobs"]
        assert (job["id"], job["state"], job["reason"]) == (str(later), "PENDING", "BeginTime")
        listed = cluster.run("python", "-m", "headrace", "status", cwd=tmp_path, env=job_env())
        assert {f"headrace-train {number} waits" in listed for number in (held, later)} == {True}
    finally:
        cluster.run("scancel", str(held), str(later))


def test_another_program_and_spaces_in_paths_do_not_end_a_status(cluster: VirtualCluster, tmp_path: Path) -> None:
    """Slurm prints the command line of a job without its quotes."""
    place = tmp_path / "a place"
    place.mkdir()
    (place / "sleep.sh").write_text("#!/bin/bash\nsleep 60\n")
    other = cluster.sbatch(str(place / "sleep.sh"), "don't", options=["--hold"], cwd=place, env=job_env())
    options = ["--hold", f"--comment={place}/run"]
    ours = cluster.sbatch(str(place / "sleep.sh"), options=options, cwd=place, env=job_env())
    try:
        listed = cluster.run("python", "-m", "headrace", "status", cwd=place, env=job_env())
        assert f"{other} waits" in listed
        shown = cluster.run("python", "-m", "headrace", "status", f"{place}/run", cwd=place, env=job_env())
        assert f"{ours} waits: held" in shown
        assert str(other) not in shown.split()
        [output] = files_of(cluster, ours, place)
        assert output == f"{place}/slurm-{ours}.out"
    finally:
        cluster.run("scancel", str(other), str(ours))


def files_of(cluster: VirtualCluster, number: int, cwd: Path) -> list[str]:
    code = f"from pipeline.cluster.status.slurm import output_files; print(*output_files(['{number}']), sep='\\n')"
    return cluster.run("python", "-c", code, cwd=cwd, env=job_env()).splitlines()
