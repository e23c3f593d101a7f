"""`headrace submit` up to sbatch, with stand-ins for Slurm's commands: what is left of it, spaces in paths."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from headrace.submission import snapshot
from headrace.submission.configs import Given
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
