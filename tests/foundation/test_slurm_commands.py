"""Slurm's commands where they fail, hang or are not there, played by small programs; real: tests/virtual_cluster."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from foundation.slurm import cancel_jobs, run_slurm, submit_job


def program(directory: Path, text: str) -> str:
    path = directory / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def refused(said: str) -> ConfigError:
    return ConfigError("submit", why=said, remedy="?")


def test_a_command_that_is_not_there_or_hangs_has_failed_and_says_why(tmp_path: Path) -> None:
    missing = run_slurm(str(tmp_path / "squeue"))
    assert missing.returncode
    assert "No such file" in missing.stderr
    began = time.monotonic()
    slow = run_slurm(program(tmp_path, "exec sleep 60"), timeout_s=0.2)
    assert slow.returncode
    assert slow.stderr.endswith("program did not answer in 0.2 s")
    assert time.monotonic() - began < 30


def test_the_number_of_a_job_is_without_its_cluster(tmp_path: Path) -> None:
    for said in ("17", "17;main"):
        assert submit_job([program(tmp_path, f"echo '{said}'")], refused=refused) == "17"
    variable = program(tmp_path, 'echo "$NUMBER"')
    assert submit_job([variable], refused=refused, environ={"NUMBER": "18"}) == "18"


@pytest.mark.parametrize(("does", "said"), [("echo 'no account' >&2; exit 1", "no account"), ("exit 3", "exit code 3")])
def test_a_refused_submission_is_told_in_the_words_of_its_caller(tmp_path: Path, does: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"why: {said}"):
        submit_job([program(tmp_path, does)], refused=refused)


def test_jobs_are_canceled_where_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(program(tmp_path, 'echo "$@" >> "$(dirname "$0")/canceled"')).rename(tmp_path / "scancel")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cancel_jobs([])
    assert not (tmp_path / "canceled").exists()
    cancel_jobs(["4", "5"])
    assert (tmp_path / "canceled").read_text() == "4 5\n"
