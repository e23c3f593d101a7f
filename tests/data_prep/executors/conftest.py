"""A corpus whose map tasks run long enough to suspend a worker in the middle of one, and helpers that do so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from data_prep.executors.task_claims import RUNNING, TaskHeartbeat, read_heartbeats

COMMAND = [sys.executable, "-m", "data_prep"]
TASKS = 12


@dataclass(frozen=True)
class Job:
    """A running command."""

    process: subprocess.Popen[str]
    root: Path
    directory: Path
    config: list[str]

    def suspend_worker(self, wanted: Callable[[TaskHeartbeat], bool] = lambda _: True) -> psutil.Process:
        """Suspends the worker of a map task that has begun and not finished; returns it."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            heartbeats = (h for run in self.root.glob(f"{RUNNING}/*") for h in read_heartbeats(run))
            for heartbeat in filter(wanted, heartbeats):
                worker = _suspend(heartbeat.pid)
                number = int(heartbeat.task.split()[-1])
                if worker is not None and list((self.root / "map").glob(f".{number:05d}.*.partial")):
                    return worker
                if worker is not None:
                    worker.resume()
            time.sleep(0.01)
        raise AssertionError("no worker could be suspended in the middle of a task")

    def status(self) -> str:
        command = [*COMMAND, "status", *self.config]
        return subprocess.run(command, cwd=self.directory, capture_output=True, text=True, check=True).stdout

    def wait(self, *, timeout_s: float = 150) -> tuple[int, str]:
        printed, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, printed


def _suspend(pid: int) -> psutil.Process | None:
    try:
        worker = psutil.Process(pid)
        worker.suspend()
    except psutil.NoSuchProcess:
        return None
    return worker


def kill_tree(process: psutil.Process) -> None:
    """Sends SIGKILL to a process and all its descendants that still exist."""
    with suppress(psutil.NoSuchProcess):
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


@dataclass(frozen=True)
class Corpus:
    """A config over real source code, and the output of one local worker for it."""

    directory: Path
    config: Path
    expected: dict[str, bytes]

    def start(self, output: Path, *arguments: str, env: dict[str, str] | None = None) -> Job:
        """Starts a command that makes `output`, with `env` on top of the environment."""
        config = ["--config", str(self.config), "--set", f"output={output}"]
        process = subprocess.Popen(
            [*COMMAND, *config, *arguments],
            cwd=self.directory,
            env=os.environ | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Job(process, output.parent / f".{output.name}.job", self.directory, config)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """About 4 MB of Python's standard library, in `TASKS` map tasks with the slower tokenizer engine."""
    directory = tmp_path_factory.mktemp("executors")
    texts = [path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    lines = [json.dumps({"text": text}) for text in texts]
    (directory / "library.jsonl").write_text("\n".join(lines) + "\n")
    config = {
        "output": "not set",
        "sources": [{"path": "library.jsonl", "name": "library"}],  # relative: workers start elsewhere
        "tokenizer": {"train": "bpe", "vocab_size": 400, "sample_bytes": 200_000, "engine": "tokenizers"},
        "heldout_fraction": 0.1,
        "task_bytes": (directory / "library.jsonl").stat().st_size // TASKS,
        "shard_tokens": 500_000,
    }
    (directory / "corpus.json").write_text(json.dumps(config))
    empty = Corpus(directory, directory / "corpus.json", {})
    code, printed = empty.start(directory / "expected", "--workers", "1").wait()
    assert code == 0, printed
    return Corpus(directory, empty.config, tree(directory / "expected"))


def tree(root: Path) -> dict[str, bytes]:
    """Every file below `root`, by relative path; the manifest without the version of the code and its checksum."""
    found = {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
    manifest = json.loads(found["manifest.json"])
    del manifest["code"], manifest["checksum"]
    return found | {"manifest.json": json.dumps(manifest).encode()}
