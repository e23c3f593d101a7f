"""Shares of a phase that help each other: tasks that wait, slow ones, and ones that another has finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep import phases
from data_prep.config import load
from data_prep.executors.base import attempt
from data_prep.executors.local import Local
from data_prep.helping import Helper
from data_prep.tasks.base import Counts, Task, scratch_path

Tree = dict[str, bytes]
TOKENIZER = {"train": "bpe", "vocab_size": 300, "sample_bytes": 100_000}
COMMAND = [sys.executable, "-m", "data_prep"]


def map_tasks(work: Path, config: str) -> list[Task]:
    """With paths that hold wherever this process is."""
    return list(phases.map_tasks(phases.prepared(load(work / config, []))))


def unheard(_counts: Counts) -> None:
    """For what a test does not count."""


def test_one_share_alone_finishes_the_phase_if_it_is_to_help(
    mixed_config: str, finished_work: Path, work: Path, cli: Any, bytes_of: Callable[[Path], Tree]
) -> None:
    cli("prepare", "--config", mixed_config)
    for phase in ("map", "reduce"):
        cli("phase", phase, "--config", mixed_config, "--task", "1", "--of", "3", "--help-others", "--workers", "2")
        again = cli("phase", phase, "--config", mixed_config, "--task", "0", "--of", "3", "--help-others").stderr
        assert "tasks were finished before" in again
        assert f"finished 0 {phase} tasks of other shares" in again
    cli("finish", "--config", mixed_config)
    assert bytes_of(work / "tokens") == bytes_of(finished_work / "tokens")


@pytest.mark.usefixtures("work")
def test_a_frozen_share_is_done_by_another_and_sees_it_when_it_goes_on(work: Path, write_config: Any, cli: Any) -> None:
    texts = "".join(json.dumps({"text": f"{i} la rivière " * 400}) + "\n" for i in range(16_000))
    (work / "rows.jsonl").write_text(texts)
    config = write_config(sources=[{"path": "rows.jsonl"}], task_bytes=1 << 24, tokenizer=TOKENIZER)
    cli("prepare", "--config", config)
    share = [*COMMAND, "phase", "map", "--config", config, "--task", "1", "--of", "2"]
    process = subprocess.Popen(share, cwd=work, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while not list((work / ".tokens.job/map").glob(".*.partial")):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGSTOP)
        tasks = map_tasks(work, config)
        assert not tasks[1].finished
        with Local(2) as executor:
            helped = Helper(tasks, workers=2, usual_s=None, slow_s=0.3).run(executor, unheard)
        assert helped == len(tasks)
        written = (tasks[1].final / "done.json").stat()
        os.killpg(process.pid, signal.SIGCONT)
        assert process.wait(60) == 0
        assert (tasks[1].final / "done.json").stat() == written
        assert not list((work / ".tokens.job/map").glob(".*.partial"))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_task_stops_when_another_attempt_at_it_has_finished(mixed_config: str, work: Path, cli: Any) -> None:
    cli("prepare", "--config", mixed_config)
    task = map_tasks(work, mixed_config)[0]
    reports = 0

    def overtake(_counts: Counts) -> None:
        nonlocal reports
        reports += 1
        if reports == 1:
            task.run(unheard)
            time.sleep(1.1)

    kind, value = attempt(task, overtake)
    assert (kind, reports) == ("done", 1)
    assert value == json.loads((task.final / "done.json").read_text())


def test_what_two_have_begun_is_left_to_them_and_what_fails_to_its_own_share(
    mixed_config: str, work: Path, cli: Any, capsys: Any
) -> None:
    cli("prepare", "--config", mixed_config)
    tasks = map_tasks(work, mixed_config)
    scratches = [scratch_path(tasks[0].final) for _ in range(2)]
    for scratch in scratches:
        scratch.mkdir()
    with Local(1) as executor:
        assert Helper(tasks, workers=1, usual_s=None).run(executor, unheard) == len(tasks) - 1
        assert not tasks[0].finished
        scratches[0].rmdir()
        (work / "texts" / "3.md").write_text("changed")
        assert Helper(tasks, workers=1, usual_s=None, slow_s=0.1).run(executor, unheard) == 0
    assert "helping ends" in capsys.readouterr().err
