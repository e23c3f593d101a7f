"""The Spark executor on a standalone cluster of two workers. Processes are killed by SIGKILL."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.data_prep.executors.conftest import Corpus, kill_tree, tree
from tests.support import wait_until

pyspark = pytest.importorskip("pyspark", reason="needs Spark: pip install pyspark")
pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="needs Java 17 (Debian: openjdk-17-jre-headless)")

HERE = "127.0.0.1"
# quick to start, small, and independent of the user's Spark settings
ENV = {
    "SPARK_LOCAL_IP": HERE,
    "SPARK_DAEMON_MEMORY": "256m",
    "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto",
}
SETTINGS = "--conf spark.executor.memory=512m --driver-memory 512m pyspark-shell"


@dataclass(frozen=True)
class Standalone:
    master: str
    workers: list[psutil.Process]


def _daemon(directory: Path, name: str, *arguments: str) -> psutil.Process:
    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    kind = f"org.apache.spark.deploy.{name}.{name.capitalize()}"
    with (directory / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [program, kind, "--host", HERE, "--port", "0", "--webui-port", "0", *arguments],
            env=os.environ | ENV | {"SPARK_WORKER_DIR": str(directory / "work")},
            stdout=log,
            stderr=log,
        )
    return psutil.Process(process.pid)


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    directory = tmp_path_factory.mktemp("spark")
    master = _daemon(directory, "master")
    processes = [master]
    try:
        address = _wait_for_line(directory / "master.log", r"Starting Spark master at (spark://\S+)")
        size = ("--cores", "1", "--memory", "512m")
        processes += [_daemon(directory, "worker", *size, address) for _ in range(2)]
        yield Standalone(address, processes[1:])
    finally:
        for process in processes:
            kill_tree(process)


def _wait_for_line(log: Path, pattern: str) -> str:
    wait_until(lambda: re.search(pattern, log.read_text()), said=log.read_text)
    return re.search(pattern, log.read_text())[1]


def test_a_worker_killed_in_a_task_changes_no_output(corpus: Corpus, standalone: Standalone, tmp_path: Path) -> None:
    options = ["--executor", "spark", "--address", standalone.master]
    job = corpus.start(tmp_path / "tokens", *options, env=ENV | {"PYSPARK_SUBMIT_ARGS": SETTINGS})
    suspended = job.suspend_worker()
    assert re.search(rf"map: \d+ of \d+ tasks finished\n(.*\n)*  \S+:{job.process.pid} map \d+% ", job.status())
    (machine,) = (worker for worker in standalone.workers if suspended in worker.children(recursive=True))
    kill_tree(machine)
    code, printed = job.wait()
    assert code == 0, printed
    assert tree(tmp_path / "tokens") == corpus.expected
    assert sorted(path.name for path in tmp_path.iterdir()) == [".headrace-tokenizers", "tokens"]


def test_a_task_error_is_printed_as_one_message_without_a_stack_trace(corpus: Corpus, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes((corpus.directory / "library.jsonl").read_bytes() + b"no json\n")
    options = ["--executor", "spark", "--workers", "2", "--set", f"sources.0.path={bad}"]
    code, printed = corpus.start(tmp_path / "tokens", *options, env=ENV).wait()
    assert code == 2
    assert printed.count("error: ") == 1
    assert "bad.jsonl" in printed
    assert "Traceback" not in printed
    assert "park" not in printed.split("error: ")[1]
