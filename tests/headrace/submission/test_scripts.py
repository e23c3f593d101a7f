"""The scripts that `headrace submit` writes: headers, arguments, sweeps; printed by --dry-run, without Slurm."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError
from foundation.shipped import SHARE
from headrace.submission import snapshot
from headrace.submission.configs import elements
from headrace.submission.stages import fill
from tests.conftest import ROOT
from tests.headrace.commands.test_app import run
from tests.support import output_of

TRAINING: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
    },
    "data": {"sources": [{"path": "tokens"}], "sequence_length": 64},
    "run": {"dir": "runs/small", "steps": 4},
}
STUDENT = {**TRAINING, "model": {"config": "auto", "path": "set"}, "distill": {"teacher": "set"}}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a corpus and the configs of the whole way; no Slurm on PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin-without-slurm:/bin-without-slurm")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some words\n" * 500)
    write(tmp_path, "corpus", {"output": "tokens", "sources": [{"path": "text"}], "tokenizer": {"train": "bpe"}})
    write(tmp_path, "train", TRAINING)
    write(tmp_path, "student", STUDENT)
    recipe = {
        "model": "runs/small",
        "output": "small",
        "data": {"path": "tokens"},
        "quantize": {"q": {"scheme": "W8A8"}},
    }
    write(tmp_path, "quantize", {"model": "runs/small", "output": "q", "scheme": "W8A8", "data": {"path": "tokens"}})
    write(tmp_path, "compress", {**recipe, "distill": {"config": "student.json"}})
    return tmp_path


def write(directory: Path, name: str, config: dict[str, Any]) -> None:
    (directory / f"{name}.json").write_text(json.dumps(config))


def scripts_in(output: str) -> dict[str, str]:
    parts = re.split(r"^==> (\S+) <==\n", output, flags=re.MULTILINE)[1:]
    return {Path(path).stem: text.split("\n$ ")[0] for path, text in zip(parts[::2], parts[1::2], strict=True)}


def commands_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("$ sbatch")]


def test_the_whole_way_is_a_chain_in_which_each_stage_waits_for_what_its_config_names(work: Path) -> None:
    before = sorted(work.rglob("*"))
    said = run("submit", "corpus.json", "train.json", "compress.json", "--nodes", "2", "--dry-run")
    scripts = scripts_in(said)
    assert list(scripts) == ["data", "train", "export", "compress"]
    commands = commands_in(said)
    assert [command for command in commands if "--job-name=headrace-map" in command]
    train, export, compress = commands[-3:]
    assert "--dependency=afterok:$data --kill-on-invalid-dep=yes" in train
    assert "--dependency=afterok:$train " in export
    assert "--dependency=afterok:$data:$train:$export " in compress
    assert "set -- export runs/small small/original" in scripts["export"]
    assert re.search(r"set -- compress run --config \S+/configs/compress.json", scripts["compress"])
    assert "#SBATCH --nodes=2" in scripts["train"]
    assert "data, model and memory are checked at the start of the job" in said
    assert sorted(work.rglob("*")) == before  # nothing was written


def test_every_script_is_bash_and_its_header_holds_the_options_of_the_site(work: Path) -> None:
    site = 'partition = "gpu"\nmail = "me@lab"\nextra = ["--exclusive"]\n'
    site += '[train]\ngpus = 2\ncpus = 3\n[data]\npartition = "cpu"\n'
    (work / "site.toml").write_text(site)
    configs = ["corpus.json", "train.json", "compress.json"]
    said = run("submit", *configs, "--nodes", "2", "--site", "site.toml", "--dry-run")
    for name, text in scripts_in(said).items():
        subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=True)
        header = [line for line in text.split("\nset -euo")[0].splitlines() if line.startswith("#SBATCH")]
        assert f"#SBATCH --partition={'cpu' if name == 'data' else 'gpu'}" in header
        assert {"#SBATCH --exclusive", "#SBATCH --mail-type=END,FAIL"} <= set(header)
        assert len({line.split("=")[0] for line in header}) == len(header)  # no option twice
        if name == "train":
            assert {"#SBATCH --ntasks-per-node=2", "#SBATCH --gpus-per-node=2", "#SBATCH --cpus-per-task=3"} <= set(
                header
            )
    assert "train.json, 4 processes" in said


@pytest.mark.parametrize("name", ["train.sbatch", "pipeline.sbatch", "data_prep.sbatch"])
def test_the_body_of_a_script_stays_as_it_is_shipped(name: str) -> None:
    shipped = ROOT / "slurm" / name
    text = fill(shipped, about="About.", options={"--time": "1", "--account": "a"}, settings=["set -- x"])
    body = "set -euo pipefail" + shipped.read_text().split("set -euo pipefail", 1)[1]
    assert text.endswith(f"\nset -- x\n\n{body}")
    assert text.count("#SBATCH --time=") == text.count("#SBATCH --account=") == 1
    assert "##SBATCH --account" not in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.json", "--set", "run.stepz=3"], "did you mean 'steps'?"),
        (["train.json", "--nodes", "3"], "train_batch_size"),
        (["train.json", "--nodes", "two"], "it is not a number of nodes"),
        (["train.json", "--nodes", "1,2"], "there are 2 numbers and 1 training configs"),
        (["student.json"], "slurm/train.sbatch has no teacher"),
        (["corpus.json", "compress.json", "--set", "a=1"], "several configs are given, and it names none of them"),
        (["corpus.json", "train.json", "compress.json", "--sweep", "run.seed=1,2"], "compress.json reads the run"),
        (["train.json", "--sweep", "run.steps=3,4", "--sweep", "run.seed=1,1"], "run.seed=1,1"),
        (["train.json", "--sweep", "run.seed"], "it is not KEY=VALUE,VALUE"),
        (["train.json"], "tokens"),  # no corpus config makes them
        (["absent.json"], "no such file"),
        (["train.json", "--nodes", "²"], "it is not a number of nodes"),
        (["corpus.json", "train.json", "train.json"], "train.json of the same submission writes there, too"),
        (["corpus.json", "train.json", "quantize.json"], "a quantize config reads an exported model"),
        (["train.json", "--sweep", "run.dir=a,b"], "--set run.dir=... moves all of them"),
        (["train.json", "--sweep", "model.path=a/b,a_b"], "two elements would have one run directory"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_submitted(work: Path, words: list[str], told: str) -> None:
    assert told in run("submit", *words, "--dry-run", code=2)
    assert not (work / "runs").exists()


def test_finished_data_prep_is_not_submitted_again(work: Path, tokens: Path) -> None:
    corpus = {**json.loads((tokens.parent / "corpus.json").read_text())}
    write(work, "done", corpus)
    said = run("submit", "done.json", "--dry-run")
    assert "is there already" in said
    assert "nothing to do" in said
    data = f'data.sources=[{{"path": "{tokens}"}}]'
    said = run("submit", "done.json", "train.json", "--set", data, "--dry-run")
    assert list(scripts_in(said)) == ["train"]
    assert "--dependency" not in commands_in(said)[-1]
    assert "memory  peak" in said  # what it reads is there: it is checked wholly


def test_a_config_whose_ranks_do_not_fit_the_sites_gpus_is_refused_with_the_numbers(work: Path, tokens: Path) -> None:
    (work / "site.toml").write_text('[train]\ndevice_memory = "1MB"\n')
    data = f'data.sources=[{{"path": "{tokens}"}}]'
    said = run("submit", "train.json", "--set", data, "--site", "site.toml", "--dry-run", code=2)
    assert "a rank does not fit 1.0 MB" in said
    assert "a smaller micro-batch" in said


@pytest.mark.usefixtures("work")
def test_jobs_of_an_installed_package_run_its_own_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(snapshot, "CLONE", tmp_path)  # no slurm/ beside the package
    said = run("submit", "corpus.json", "train.json", "--dry-run")
    assert f"export HEADRACE_ROOT={SHARE}\n" in scripts_in(said)["train"]
    assert (SHARE / "slurm" / "env.sh").is_file()


def test_without_slurm_nothing_can_be_submitted_and_containers_only_be_printed(work: Path) -> None:
    assert "there is no sbatch on PATH" in run("submit", "corpus.json", "train.json", code=2)
    (work / "site.toml").write_text('[container]\nruntime = "apptainer"\nimage = "/i.sif"\n')
    said = run("submit", "corpus.json", "train.json", "--site", "site.toml", "--dry-run")
    assert "unverified" in said
    assert "exec apptainer exec --nv --bind" in said
    subprocess.run(["/bin/bash", "-n"], input=scripts_in(said)["train"], text=True, check=True)


@pytest.mark.usefixtures("work")
def test_each_element_of_a_sweep_has_its_values_and_a_run_directory_of_its_own() -> None:
    words = ["--sweep", "optimizer.params.lr=1e-3,3e-4", "--sweep", "run.seed=1,2"]
    text = scripts_in(run("submit", "corpus.json", "train.json", *words, "--dry-run"))["train"]
    assert "#SBATCH --array=0-3" in text
    assert '/configs/train-"$SLURM_ARRAY_TASK_ID".json' in text
    assert "# element 1: optimizer.params.lr=1e-3 run.seed=2, in runs/small/lr=1e-3,seed=2" in text
    points = elements(Path("r"), ["run.note=a/b,c"])
    assert [str(each.run_dir) for each in points] == ["r/note=a_b", "r/note=c"]
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        elements(Path("r"), ["run.seed=1,,2"])


@pytest.mark.parametrize(
    ("variables", "words", "expected"),
    [
        ({}, ["train.json"], ["train.json"]),
        ({"SLURM_ARRAY_TASK_ID": "1"}, ["train.json"], ["train.json", "--set", "run.dir=runs/small/element-1"]),
        (
            {"SLURM_ARRAY_TASK_ID": "1"},
            ["train.json", "--set", "run.dir=other", "--sweep", "run.seed=1,2"],
            ["train.json", "--set", "run.dir=other", "--set", "run.seed=2", "--set", "run.dir=other/seed=2"],
        ),
        ({"SLURM_ARRAY_TASK_ID": "1", "HEADRACE_SWEEP": "resolved"}, ["train.json"], ["train.json"]),
    ],
)
def test_elements_of_a_plain_sbatch_array_do_not_share_a_run_directory(
    work: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: list[str], expected: list[str]
) -> None:
    assert output_of(in_job(work, monkeypatch, words, variables)).splitlines() == expected


def test_a_sweep_without_a_fitting_array_names_the_option(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in ({}, {"SLURM_ARRAY_TASK_ID": "2"}):
        done = in_job(work, monkeypatch, ["train.json", "--sweep", "run.seed=1,2"], variables)
        assert done.returncode == 2
        assert "sbatch --array=0-1" in done.stderr
    done = in_job(work, monkeypatch, ["train.json", "--set", "run=5"], {"SLURM_ARRAY_TASK_ID": "0"})
    assert done.stderr.startswith("error: run.dir\n")


def in_job(
    work: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    monkeypatch.undo()  # PATH
    script = f'source {ROOT}/slurm/sweep.sh; headrace_sweep "$@"; printf "%s\\n" "${{HEADRACE_ARGUMENTS[@]}}"'
    with monkeypatch.context() as patched:
        for name, value in {**variables, "PYTHONPATH": str(ROOT)}.items():
            patched.setenv(name, value)
        command = ["bash", "-euo", "pipefail", "-c", script, "train.sbatch", *words]
        return subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
