"""`headrace status`: what it says of runs that train, have finished, were killed or are none."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from foundation.directory import write_manifest
from foundation.errors import DataError
from pipeline.cluster.status.run import read_status
from pipeline.runtime.faults.report import FILE_NAME as FAULTS
from pipeline.runtime.launch.run_lock import exclusive_run
from pipeline.runtime.metrics.journal import NAME as JOURNAL
from tests.conftest import text_folders, write_config
from tests.headrace.commands.test_app import run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of 20 steps that has got to step 7."""
    directory = tmp_path / "runs" / "small"
    directory.mkdir(parents=True)
    details = {"step": 5, "steps": 20, "finished": False}
    write_manifest(directory, kind="run", config={}, details=details)
    rows: list[dict[str, Any]] = [{"kind": "event", "step": 0, "event": "started", "world_size": 2}]
    rows += [
        {"kind": "step", "step": step, "loss": 7.0 - step / 10, "tokens_per_second": 1234.5, "tokens": 256 * step}
        for step in range(1, 8)
    ]
    rows.insert(6, {"kind": "eval", "step": 5, "loss": 6.75})
    rows.insert(7, {"kind": "event", "step": 5, "event": "checkpoint_failed", "why": "no space left"})
    (directory / JOURNAL).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "checkpoints" / "step-00000005").mkdir(parents=True)
    fault = {
        "kind": "event",
        "step": 3,
        "event": "fault",
        "fault": "lost",
        "ranks": [{"rank": 1, "host": "n2", "step": 3, "phase": "training"}],
    }
    (directory / FAULTS).write_text(json.dumps(fault) + "\n")
    return directory


def test_the_newest_step_checkpoint_and_faults_are_told(run_dir: Path) -> None:
    said = run("status", run_dir)
    lines = dict(line.strip().split("  ", 1) for line in said.splitlines() if "fault" not in line)
    assert lines["step"] == "7 of 20 (35 %)"
    assert lines["loss"] == "6.3000 nats/token"
    assert lines["held-out loss"] == "6.7500 nats/token"
    assert lines["speed"] == "1,234 tokens/s"
    assert lines["checkpoint"].startswith(f"{run_dir / 'checkpoints/step-00000005'}, 0 seconds ago, DAMAGED: ")
    assert lines["process"].startswith("none; the journal was written ")
    assert "rank 1 on n2 lost its connection to another rank at step 3, in training" in said
    assert "checkpoint_failed at step 5: no space left" in said


def test_json_has_the_same_for_a_program(run_dir: Path) -> None:
    found = json.loads(run("status", run_dir, "--json"))
    assert (found["step"], found["steps"], found["checkpoint_step"]) == (7, 20, 5)
    assert (found["training"], found["finished"]) == (False, False)
    assert [fault["step"] for fault in found["faults"]] == [3, 5]


def test_a_process_that_trains_is_seen_and_not_disturbed(run_dir: Path) -> None:
    with exclusive_run(run_dir):
        assert read_status(run_dir).training is True
        assert "training now" in run("status", run_dir)
    with (run_dir / ".lock").open() as file:  # nothing is held any more
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert read_status(run_dir).training is False


def test_half_a_line_and_a_run_without_a_step_are_no_error(run_dir: Path) -> None:
    (run_dir / JOURNAL).write_text('{"kind": "event", "step": 0, "event": "started"}\n{"kind": "st')
    assert "0 of 20 (0 %)" in run("status", run_dir)


def test_the_config_of_a_run_stands_for_its_directory(run_dir: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", {"run": {"dir": str(run_dir)}})
    assert run("status", config, "--reason") == run("status", run_dir, "--reason")
    assert json.loads(run("status", config, "--json"))["dir"] == str(run_dir)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("corpus", "sources = []"),
        (".tokens.job", "job.json is damaged"),
        ("checkpoint", "headrace status"),
        ("nowhere", "no such directory"),
        ("empty", "no run has begun there"),
        ("/", "no run has begun there"),
        ("config without run.dir", "run.dir"),
    ],
)
def test_what_is_no_run_is_refused_with_where_to_look(tmp_path: Path, made: str, words: str) -> None:
    path = tmp_path / made
    if made == "corpus":
        path = write_config(tmp_path / "corpus.json", {"output": "tokens", "sources": []})
    elif made.startswith("config"):
        path = write_config(tmp_path / "c.json", {"model": {}})
    elif made not in ("nowhere", "/"):
        path.mkdir()
    if made == "checkpoint":
        write_manifest(path, kind=made, config={})
    if made == ".tokens.job":
        (path / "job.json").write_text("{}")
    assert words in run("status", path, code=2)


def test_a_data_prep_job_shows_its_phases_by_its_directory_its_output_and_its_config(tmp_path: Path) -> None:
    config = tmp_path / "corpus.json"
    source = {"type": "text", "path": str(text_folders()[0])}
    tokenizer = {"train": "bpe", "vocab_size": 300}
    fields = {"sources": [source], "tokenizer": tokenizer, "heldout_fraction": 0.0}
    write_config(config, {"output": str(tmp_path / "tokens"), **fields})
    run("prep", "prepare", "--config", config)
    shown = run("status", config)
    assert "map: 0 of 1 tasks finished" in shown
    assert run("status", tmp_path / ".tokens.job") == run("status", tmp_path / "tokens") == shown
    other = run("status", config, "--set", f"output={tmp_path / 'other'}", code=2)
    assert f"there is no job in {tmp_path}/.other.job" in other
    assert json.loads(run("status", config, "--json")) == {"data_prep": shown.splitlines()}
    run("prep", "--config", config, "--workers", "1")
    assert run("status", tmp_path / "tokens") == f"{tmp_path / 'tokens'} is finished\n"


def test_a_chain_of_slurm_jobs_that_ended_before_the_job_began_shows_the_end_of_its_log(tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "corpus.json",
        {"output": str(tmp_path / "tokens"), "sources": [{"path": "/text"}], "tokenizer": {"train": "bpe"}},
    )
    logs = tmp_path / "tokens.logs"
    for number in ("1", "2"):
        (logs / number).mkdir(parents=True)
    assert f"has not written to {logs}/2 yet" in run("status", config, code=2)
    (logs / "2/chain.out").write_text("error: /text: no such directory\n")
    assert f"the end of {logs}/2/chain.out:\n    error: /text: no such directory" in run("status", config, code=2)


@pytest.mark.usefixtures("run_dir")
def test_without_a_run_those_below_the_directory_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = next(line for line in run("status").splitlines() if "runs/small" in line)
    assert "stopped" in row
    assert "7 of 20 (35 %)" in row
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert "no run was found below" in run("status", code=2)


def test_a_damaged_manifest_is_told_of(run_dir: Path) -> None:
    (run_dir / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        read_status(run_dir)
