"""A run whose directory is in an object store (a real S3 server): it resumes from there alone, and loses nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.base.remote_directory import CACHE
from headrace.base.remote_run import local_run, remote_checkpoints, working_directory
from tests.conftest import launch, losses, tiny_config, write_config
from tests.object_store import s3_server

URL = "s3://store/runs/a"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    with s3_server("store") as files:
        yield files


def config_of(tokens: Path, work: Path, run_dir: str | Path, **run: Any) -> Path:
    section = {"dir": str(run_dir), "steps": 20, "seed": 7, "checkpoint_every": 5, **run}
    config = tiny_config(tokens, work, run=section, engine="torch", watchdog={"heartbeat_timeout": 6.0})
    return write_config(work / "c.json", config)


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != "manifest.json"}


@pytest.mark.usefixtures("store")
def test_a_run_in_a_bucket_has_the_checkpoints_of_a_local_one_and_goes_on_from_there_alone(
    tokens: Path, tmp_path: Path
) -> None:
    launch("train.py", config_of(tokens, tmp_path, tmp_path / "local"), processes=2)
    said = launch("train.py", config_of(tokens, tmp_path, URL, steps=10), processes=2)
    print(said)
    assert f"checkpoint uploaded to {URL}/checkpoints/step-00000010.1" in said
    shutil.rmtree(tmp_path / "cache")
    said = launch("train.py", config_of(tokens, tmp_path, URL, allow_change=["run.steps", "scheduler"]), processes=2)
    print(said)
    assert "resuming after step 10" in said
    assert [each.step for each in remote_checkpoints(URL)] == [20, 15]
    shutil.rmtree(tmp_path / "cache")
    run_dir = local_run(URL)
    assert run_dir == working_directory(URL)
    assert losses(run_dir).keys() == losses(tmp_path / "local").keys()
