"""`headrace submit` up to sbatch, without Slurm: the scripts it writes, sweeps, what is left to do, the site's file."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError
from foundation.shipped import SHARE
from headrace.submission import snapshot
from headrace.submission.configs import Given, elements
from headrace.submission.environment import settings_of, venv_of
from headrace.submission.site import STAGES, SiteConfig, load_site
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


@pytest.mark.usefixtures("work")
def test_doctor_runs_before_each_training_on_its_nodes_and_the_training_waits_for_its_success() -> None:
    said = run("submit", "corpus.json", "train.json", "--nodes", "2", "--doctor", "--dry-run")
    scripts, commands = scripts_in(said), commands_in(said)
    assert list(scripts) == ["data", "doctor", "train"]
    [train] = [each for each in commands if each.endswith("/train.sbatch")]
    assert "--dependency=afterok:$data:$doctor --kill-on-invalid-dep=yes" in train
    [doctor] = [each for each in commands if each.endswith("/doctor.sbatch")]
    assert "--dependency=afterok:$data " in doctor
    assert "\n#SBATCH --nodes=2\n" in scripts["doctor"]
    assert re.search(r"\nset -- --config \S+/configs/train.json --nproc 1 --out \S+/doctor\n", scripts["doctor"])
    swept = scripts_in(run("submit", "corpus.json", "train.json", "--doctor", "--sweep", "run.seed=1,2", "--dry-run"))
    assert "/configs/train-0.json --nproc" in swept["doctor"]


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


@pytest.mark.parametrize("name", ["train.sbatch", "pipeline.sbatch", "data_prep.sbatch", "doctor.sbatch"])
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


@pytest.fixture
def slurm(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of stand-ins, first on PATH: a Slurm that has no jobs, and takes none."""
    folder = work / "bin"
    folder.mkdir()
    stand_in(folder, "sinfo", "echo main")
    stand_in(folder, "squeue", "exit 0")
    stand_in(folder, "sbatch", "echo 'sbatch: error: not today' >&2; exit 1")
    stand_in(folder, "scancel", "exit 0")
    monkeypatch.setenv("PATH", f"{folder}:{os.defpath}")
    return folder


def stand_in(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("configs", [["corpus.json"], ["corpus.json", "train.json"]])
@pytest.mark.parametrize("refused", ["at the test", "at the first job"])
def test_nothing_is_left_of_a_refused_submission(work: Path, slurm: Path, configs: list[str], refused: str) -> None:
    if refused == "at the first job":
        stand_in(slurm, "sbatch", '[ "$1" = --test-only ] || { echo no >&2; exit 1; }')
    before = sorted(work.rglob("*"))
    assert ("not today" if refused == "at the test" else "sbatch failed") in run("submit", *configs, code=2)
    assert sorted(work.rglob("*")) == before


@pytest.mark.usefixtures("slurm")
def test_a_submission_that_comes_second_leaves_the_first_as_it_is(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = work / "runs/small/submissions/1"

    def then_another_makes_it(_: list[Given]) -> Path:
        (first / "code").mkdir(parents=True)
        return first

    monkeypatch.setattr(snapshot, "directory_of", then_another_makes_it)
    said = run("submit", "corpus.json", "train.json", code=2)
    assert f"{first} has been made meanwhile, by another submission" in said
    assert (first / "code").is_dir()


def test_a_slurm_that_does_not_answer_is_not_taken_for_one_without_jobs(work: Path, slurm: Path) -> None:
    stand_in(slurm, "squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    said = run("submit", "corpus.json", "train.json", code=2)
    assert "Slurm does not answer: squeue: error: Unable to contact" in said
    assert not (work / "runs").exists()


def test_spaces_and_apostrophes_in_paths_are_quoted_in_the_header(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = work / "it's here"
    place.mkdir()
    for path in [*work.glob("*.json"), work / "text"]:
        path.rename(place / path.name)
    monkeypatch.chdir(place)
    said = run("submit", "corpus.json", "train.json", "--sweep", "run.seed=1,2", "--dry-run")
    assert len(commands_in(said)) > 4
    scripts = said.split(" <==\n")[1:]
    assert len(scripts) == 2
    for text in scripts:
        header = [line for line in text.split("\nset -euo")[0].splitlines() if line.startswith("#SBATCH")]
        words = [shlex.split(line.removeprefix("#SBATCH")) for line in header]
        assert {len(each) for each in words} == {1}, header
        assert [f"--chdir={place}"] in words


def test_a_run_within_the_clone_is_not_copied_into_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "CLONE", tmp_path)
    for name in ("slurm/env.sh", "demo/corpus.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    directory = tmp_path / "demo/out/submissions/1"
    directory.mkdir(parents=True)
    snapshot.copy_code(directory)
    assert (directory / "code/demo/corpus.json").is_file()
    assert not (directory / "code/demo/out/submissions").exists()


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "site.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('partitoin = "gpu"', "did you mean 'partition'?"),
        ("[train]\ngpu = 8\n", "did you mean 'gpus'?"),
        ('[train]\ngpus = "8"\n', "site.toml.train.gpus = '8'"),
        ('extra = ["constraint=h100"]', "starts with '--'"),
        ('venv = "/nowhere"', "there is no virtual environment there"),
        ('mounts = ["scratch"]', "it is not an absolute path"),
        ('[container]\nruntime = "docker"\nimage = "x"\n', "site.toml.container.runtime = 'docker'"),
        ("partition = gpu", "Invalid value"),
        ('[train]\ndevice_memory = "80XB"\n', "not a positive number with a unit"),
        ('environment = { "A B" = "c" }\n', "'A B' cannot be the name of a variable"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key_and_a_remedy(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_site(written(tmp_path, text))


def test_a_stage_has_the_values_of_its_table_and_else_those_of_the_top(tmp_path: Path) -> None:
    text = (
        'partition = "gpu"\ntime = "1:00:00"\nextra = ["--exclusive"]\n[data]\npartition = "cpu"\nextra = ["--nice"]\n'
    )
    site, _ = load_site(written(tmp_path, text))
    data, train = site.stage("data"), site.stage("train")
    assert (data.partition, data.time, data.extra) == ("cpu", "1:00:00", ["--exclusive", "--nice"])
    assert (train.partition, train.time, train.extra) == ("gpu", "1:00:00", ["--exclusive"])


def test_the_shipped_file_sets_nothing_and_shows_keys_that_exist() -> None:
    path = ROOT / "slurm" / "site.toml"
    assert load_site(path)[0] == SiteConfig()
    section, shown = "", []
    for line in path.read_text().splitlines():
        if found := re.match(r"(?:# )?\[(\w+)\]", line):
            section = found[1]
        elif found := re.match(r"# (\w+) = ", line):
            shown.append((section, found[1]))
    assert len(shown) > 15
    for name, key in shown:
        fields = SiteConfig.model_fields
        known = {"runtime", "image"} if name == "container" else fields
        assert key in known, (name, key)
        assert name in ("", "container", *STAGES)


def test_interface_mounts_modules_and_variables_reach_the_job(tmp_path: Path) -> None:
    text = 'interface = "ib0"\nmounts = ["/no such place"]\nmodules = ["cuda/12.8"]\nenvironment = { A = "b c" }\n'
    site, _ = load_site(written(tmp_path, text))
    lines = settings_of(site, root=Path("/code"), directory=tmp_path)
    assert "export NCCL_SOCKET_IFNAME==ib0" in lines
    assert "export A='b c'" in lines
    assert "module load cuda/12.8 || exit 2" in lines
    assert any("[ -d '/no such place' ] ||" in line for line in lines)
    assert venv_of(site) == ""  # the modules bring the python


def test_on_a_laptop_without_the_inputs_a_dry_run_drafts_the_scripts_and_says_what_is_left(work: Path) -> None:
    said = run("submit", "train.json", "--nodes", "2", "--dry-run")
    assert "train: train.json, 2 processes" in said
    assert "checked at the start of the job: tokens is not on this machine" in said
    assert "memory  peak" not in said
    assert [*scripts_in(said)] == ["train"]
    (work / "text/a.txt").unlink()
    (work / "text").rmdir()
    said = run("submit", "corpus.json", "--dry-run")
    assert "data: corpus.json is checked alone" in said
    assert [*scripts_in(said)] == ["data"]
    write(work, "alone", {"model": "elsewhere", "output": "q", "scheme": "W8A8", "data": {"path": "tokens"}})
    assert "elsewhere, tokens are not on this machine" in run("submit", "alone.json", "--dry-run")


def test_a_draft_is_refused_by_the_rules_and_an_input_that_is_here_is_checked(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no such key" in run("submit", "train.json", "--set", "run.stepz=3", "--dry-run", code=2)
    (work / "bin").mkdir()
    (work / "bin/sbatch").write_text(f"#!/bin/sh\ntouch {work}/submitted\n")
    (work / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(work / "bin"))
    assert "tokens: no such directory" in run("submit", "train.json", code=2)  # no draft is submitted
    assert not (work / "submitted").exists()
    (work / "tokens").mkdir()
    assert "tokens" in run("submit", "train.json", "--dry-run", code=2)
