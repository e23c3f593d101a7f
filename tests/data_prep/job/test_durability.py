"""What a planned job relies on is on the disk before job.json says that it is planned; so is the result of a task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.task import atomic_directory
from headrace.base.directory import sync, write_json
from tests.data_prep.in_process import run_job


def test_the_plan_and_its_folders_are_flushed_before_job_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").mkdir()
    for i in range(200):
        (tmp_path / "text" / f"{i}.txt").write_text(f"mill {i} water turns the wheel " * 3)
    config = tmp_path / "c.json"
    tokenizer = {"train": "bpe", "vocab_size": 300}
    sources = [{"path": str(tmp_path / "text")}]
    config.write_text(json.dumps({"output": str(tmp_path / "tokens"), "sources": sources, "tokenizer": tokenizer}))
    order: list[str] = []

    def recorded_sync(path: Path) -> None:
        order.append(f"flush {path.name}")
        sync(path)

    def recorded_write(path: Path, value: Any) -> None:
        order.append(f"write {path.name}")
        write_json(path, value)

    monkeypatch.setattr("data_prep.job.directory.sync", recorded_sync)
    monkeypatch.setattr("data_prep.job.directory.write_json", recorded_write)
    run_job(str(config), until="map")
    before = order[: order.index("write job.json")]
    assert before[:3] == ["flush .plan.json.partial", "flush out", "flush .tokens.job"]
    assert order[len(before) + 1] == "flush .tokens.job"


def test_the_files_of_a_task_are_flushed_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, flushed = tmp_path / "map-00000", list[tuple[str, bool]]()
    monkeypatch.setattr("data_prep.task.sync", lambda path: flushed.append((path.name, final.exists())))
    with atomic_directory(final) as scratch:
        (scratch / "done.json").write_text("{}")
    assert flushed == [("done.json", False), (scratch.name, False), (tmp_path.name, True)]
