"""The report of a failed chain of Slurm jobs, from the logs alone: Slurm forgets jobs after MinJobAge."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.job.slurm_report import report


@pytest.fixture
def forgetful_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A squeue that knows no job, as after MinJobAge."""
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:/usr/bin:/bin")


@pytest.mark.usefixtures("forgetful_slurm")
def test_an_element_whose_log_does_not_end_well_has_failed_though_slurm_has_forgotten_it(tmp_path: Path) -> None:
    logs, root = tmp_path / "tokens.logs" / "1", tmp_path / ".tokens.job"
    logs.mkdir(parents=True)
    root.mkdir()
    (logs / "map-0.out").write_text("share 0 of 3: 4 map tasks finished\n")
    (logs / "map-1.out").write_text("error: no such file\nslurmstepd: error: *** JOB 8 DUE TO TIME LIMIT ***\n")
    lines = report(logs, root, 3, ["prepare=7", "map=8", "reduce=9", "finish=10"])
    assert lines[0] == "error: the job was not finished: 1 of its Slurm jobs failed. The first of them:"
    assert lines[1] == "map 1 (job 8): failed; Slurm no longer has the reason"
    assert "    slurmstepd: error: *** JOB 8 DUE TO TIME LIMIT ***" in lines
    assert (root / "failure.txt").read_text().splitlines() == lines  # for `headrace prep status`


@pytest.mark.usefixtures("forgetful_slurm")
def test_a_chain_of_which_nothing_is_known_refers_to_its_log(tmp_path: Path) -> None:
    lines = report(tmp_path / "absent", tmp_path, 3, ["prepare=7", "map=8"])
    assert f"see {tmp_path}/absent/chain.out" in lines[0]


@pytest.mark.usefixtures("forgetful_slurm")
def test_the_cause_of_a_failed_prepare_is_kept_with_the_report(tmp_path: Path) -> None:
    """`headrace prep status` shows the report without the log in which it was printed."""
    (tmp_path / "bin/squeue").write_text('#!/bin/sh\n[ "$3" != --jobs=7 ] || echo "7|N/A|FAILED|NonZeroExitCode"\n')
    logs, root = tmp_path / "tokens.logs" / "1", tmp_path / ".tokens.job"
    logs.mkdir(parents=True)
    root.mkdir()
    (logs / "chain.out").write_text("error: no such file\n")
    report(logs, root, 3, ["prepare=7", "map=8"])
    kept = (root / "failure.txt").read_text()
    assert f"prepare (job 7): FAILED (NonZeroExitCode)\nthe end of {logs}/chain.out:\n    error: no such file\n" in kept
