"""A real run of two processes is killed, and resumes from the copies in host memory; its files are not even there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.format.naming import finished_checkpoints
from pipeline.checkpoint.memory.memory_folder import MemoryFolder
from pipeline.cluster.status.run import read_status
from pipeline.cluster.status.text import lines_of
from pipeline.runtime.metrics.attempts_journal import read_events
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import command_line, launch, losses, start, tiny_config, write_config
from tests.support import refusal_of, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def shm() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def config_of(tokens: Path, work: Path, name: str, **run: Any) -> Path:
    section = {"dir": str(work / name), "steps": 40, "seed": 7, "checkpoint_every": 5, **run}
    return write_config(work / f"{name}.json", tiny_config(tokens, work / name, run=section, engine="torch"))


@pytest.fixture(scope="module")
def uninterrupted(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run on two processes that nobody touched."""
    work = tmp_path_factory.mktemp("whole")
    launch("train.py", config_of(tokens, work, "run"), processes=2)
    return losses(work / "run")


@pytest.fixture
def killed(tokens: Path, tmp_path: Path, shm: Path) -> Path:
    """The config of a run whose launcher and ranks were killed some steps after a checkpoint."""
    config = config_of(tokens, tmp_path, "run", in_memory_checkpoints=str(shm))
    process = subprocess.Popen(
        command_line("train.py", config, processes=2),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    memory = MemoryFolder.of(str(shm), tmp_path / "run")
    wait_until(
        lambda: finished_checkpoints(tmp_path / "run") and len(memory.sizes(newest(tmp_path / "run"))) == 2,
        process=process,
    )
    os.killpg(process.pid, signal.SIGKILL)
    for pid in pids(config):  # torchrun's ranks have sessions of their own
        os.kill(pid, signal.SIGKILL)
    process.wait()
    while pids(config):
        time.sleep(0.05)
    if len(memory.sizes(newest(tmp_path / "run"))) != 2:
        pytest.skip("a newer checkpoint was committed in the moment of the kill")
    return config


def pids(config: Path) -> list[int]:
    found = subprocess.run(["pgrep", "-f", str(config)], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in found.split() if Path(f"/proc/{word}/status").exists()]


def newest(run_dir: Path) -> int:
    return finished_checkpoints(run_dir)[0][0]


def loaded(run_dir: Path) -> dict[str, Any]:
    """What the newest start has read."""
    return [event for event in read_events(run_dir)[0] if event["event"] == "loaded"][-1]


@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.sweep)])
def test_a_killed_run_resumes_on_any_layout_without_its_files(
    killed: Path, uninterrupted: dict[int, float], tmp_path: Path, shm: Path, processes: int
) -> None:
    run_dir = tmp_path / "run"
    step = newest(run_dir)
    for path in (run_dir / "checkpoints").glob("step-*/*.distcp"):
        path.unlink()
    said = launch("train.py", killed, processes=processes)
    assert f"resuming after step {step}" in said
    assert "MB of the checkpoint from memory, 0.0 MB from the run's directory" in said
    event = loaded(run_dir)
    assert event["read"]["memory"] > 0
    assert event["read"]["run_dir"] == event["read"]["other_nodes"] == 0
    if processes == 2:
        assert losses(run_dir) == uninterrupted  # to the last bit: the layout is the same
    for number, loss in losses(run_dir).items():
        assert loss == pytest.approx(uninterrupted[number], rel=1e-5)
    assert any("from memory" in text for text in lines_of(read_status(run_dir)))
    assert not list(shm.iterdir())  # removed at the run's end


def test_a_file_neither_in_memory_nor_on_disk_is_told_and_passed_over(killed: Path, tmp_path: Path, shm: Path) -> None:
    run_dir = tmp_path / "run"
    step = newest(run_dir)
    launch("train.py", killed, f"run.steps={step + 5}", 'run.allow_change=["run.steps"]', processes=2)
    names = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert len(names) == 2
    assert not list(shm.iterdir())
    (run_dir / "checkpoints" / names[1] / "__1_0.distcp").unlink()
    steps = f"run.steps={step + 10}"
    said = launch("train.py", killed, steps, 'run.allow_change=["run.steps"]', processes=2)
    assert f"{names[1]} is damaged (__1_0.distcp" in said
    assert loaded(run_dir)["read"]["memory"] == 0


def test_a_directory_that_is_not_there_is_refused_before_anything_is_written(tokens: Path, tmp_path: Path) -> None:
    config = config_of(tokens, tmp_path, "run", in_memory_checkpoints=str(tmp_path / "missing"))
    assert "run.in_memory_checkpoints" in refusal_of(start("train.py", config))
    assert not (tmp_path / "run").exists()


def test_a_tmpfs_that_is_too_small_costs_the_copies_alone(tokens: Path, tmp_path: Path, shm: Path) -> None:
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", shm], check=False).returncode:
        pytest.skip("mounting a tmpfs takes root")
    try:
        config = config_of(tokens, tmp_path, "run", in_memory_checkpoints=str(shm), steps=10)
        said = launch("train.py", config)
        assert "were not copied into memory" in said
        rows = [row for row in read_rows(tmp_path / "run", kind="event") if row["event"] == "checkpoint_not_copied"]
        assert [row["step"] for row in rows] == [5, 10]
        assert newest(tmp_path / "run") == 10
    finally:
        subprocess.run(["umount", "-l", shm], check=True)
