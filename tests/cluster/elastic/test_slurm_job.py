"""What an agent leaves for the batch script: whole, or not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cluster.elastic.commands import Commands
from pipeline.cluster.elastic.files import RanksPlan
from pipeline.cluster.elastic.slurm_requeue import SlurmJob
from tests.conftest import room_for

ENDED = RanksPlan(reason="rank 3 on n2 has died: out of memory", outcome=1)
TEXT = "1\nrank 3 on n2 has died: out of memory\n"


def note(job: SlurmJob) -> None:
    job.note(ENDED)


def end(job: SlurmJob) -> None:
    job.end(ENDED, step=0, nodes=1, script_lives=False, say=lambda _line: None)


@pytest.mark.parametrize(("act", "name"), [(note, "outcome"), (end, "7.ended")])
def test_an_outcome_is_there_as_a_whole_or_not_at_all(
    act: Callable[[SlurmJob], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm
    monkeypatch.setattr("pipeline.cluster.elastic.slurm_requeue._UPDATE_S", 0.0)
    outcome = tmp_path / "outcome"
    job = SlurmJob("7", "n1", tmp_path, outcome, tasks=2, wanted=2, commands=Commands())
    with pytest.raises(OSError, match="File too large"), room_for(10):
        act(job)
    assert list(tmp_path.iterdir()) == []
    act(job)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == TEXT
