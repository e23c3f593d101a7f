"""`headrace submit` up to sbatch, with stand-ins for Slurm's commands: what is left of it, spaces in paths."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from headrace.submission import snapshot
from headrace.submission.configs import Given
from headrace.submission.environment import settings_of, venv_of
from headrace.submission.site import STAGES, SiteConfig, load_site
from tests.conftest import ROOT
from tests.headrace.commands.test_app import run
from tests.headrace.submission.test_scripts import commands_in, work

__all__ = ["work"]


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
