"""What an agent leaves for the batch script, whole or not there; the end of a job without Slurm's library."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cluster.elastic.commands import Commands
from pipeline.cluster.elastic.files import RanksPlan
from pipeline.cluster.elastic.slurm_requeue import SlurmJob
from tests.conftest import room_for

ENDED = RanksPlan(reason="rank 3 on n2 has died: out of memory", outcome=1)
TEXT = "1\nrank 3 on n2 has died: out of memory\n"


def job_in(directory: Path) -> SlurmJob:
    return SlurmJob("7", "n1", directory, directory / "outcome", tasks=2, wanted=2, commands=Commands())


def test_an_outcome_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"), room_for(10):
        job_in(tmp_path).note(ENDED)
    assert list(tmp_path.iterdir()) == []
    job_in(tmp_path).note(ENDED)
    assert [path.name for path in tmp_path.iterdir()] == ["outcome"]
    assert (tmp_path / "outcome").read_text() == TEXT


def test_a_job_that_cannot_be_ended_with_its_code_is_canceled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands are linked with no library here."""
    for name, text in {"scancel": 'echo "$*" >> "$0.calls"', "squeue": "echo 7", "scontrol": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    lines: list[str] = []
    job_in(tmp_path).end(ENDED, step=0, nodes=1, script_lives=False, say=lines.append)
    assert lines[-1] == (
        "Slurm could not end it with that code (scontrol is linked with no libslurm): it is canceled;"
        " submit again what waited for it"
    )
    assert (tmp_path / "scancel.calls").read_text().splitlines()[-1] == "7"
