"""The demo's whole way with every directory in a bucket, killed with SIGKILL again and again; see `run_cell`."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil

from foundation.directory import MANIFEST
from foundation.errors import HeadraceError
from foundation.remote_directory import CACHE, fetch, remote_manifest
from foundation.remote_run import remote_checkpoints
from foundation.storage import objects_below, upload
from tests.conftest import ROOT, text_folders
from tests.demo.heldout import documents
from tests.object_store import Faulty, environment, s3_server

DEMO = ROOT / "demo"
BUCKET = "s3://way"
LIMIT_S = 1200.0
"""Of one start of a stage."""
_WRITES = 8
"""A kill at a write to the store comes at one of so many."""
_FOLDERS = ("tokens", "models/teacher", "models/pruned", "logits", "models/student", "models/int4", "models/q8_0")
_RUNS = ("runs/teacher", "runs/student")
_PAGES = ("eval.csv", "cards/tokens/README.md", "cards/student/README.md", "cards/run/README.md")


@dataclass(frozen=True)
class Stage:
    """A command of the way.

    Attributes:
        name: for messages.
        words: arguments after `python`.
        output: the directory that it makes, where a second start of a finished one is refused; it is not started again.
    """

    name: str
    words: Sequence[str]
    output: str = ""


def stages(root: str, configs: Path) -> list[Stage]:
    """The way below a directory or a URL; writes its configs, which are the demo's with fewer steps and layers.

    Args:
        root: holds `corpus/`.
        configs: a directory.
    """
    configs.mkdir(parents=True)

    def config(name: str, value: Mapping[str, Any]) -> list[str]:
        (configs / f"{name}.json").write_text(json.dumps(value))
        return ["--config", str(configs / f"{name}.json")]

    run = {"steps": 60, "checkpoint_every": 10, "keep_checkpoints": 2}
    shared = {
        "data": {"sources": [{"path": f"{root}/tokens"}], "sequence_length": 64},
        "scheduler": {"params": {"warmup_num_steps": 10}},
        "evaluation": {"every": 20, "samples": 32},
        "watchdog": {"heartbeat_timeout": 10.0},
    }
    teacher = shared | {"extends": str(DEMO / "teacher.json"), "run": {**run, "dir": f"{root}/runs/teacher"}}
    distill = {"teacher": f"{root}/models/teacher", "logits": f"{root}/logits", "temperature": 2.0, "alpha": 0.5}
    student = {**shared, "extends": str(DEMO / "student.json"), "distill": distill}
    student |= {"model": {"config": "auto", "path": f"{root}/models/pruned"}}
    student |= {"run": {**run, "dir": f"{root}/runs/student", "steps": 30}}
    corpus = json.loads((DEMO / "corpus.json").read_text())
    readers = [{"name": "stdlib", "type": "text"}, {"name": "documents"}]
    paths = [f"{root}/corpus/stdlib", f"{root}/corpus/documents.jsonl"]
    corpus |= {"output": f"{root}/tokens", "tokenizer": {"train": "bpe", "vocab_size": 512}, "task_bytes": 60_000}
    corpus |= {"sources": [{**each, "path": path} for each, path in zip(readers, paths, strict=True)]}
    corpus |= {"shard_tokens": 40_000, "heldout_fraction": 0.1}
    recipe = json.loads((DEMO / "compress.json").read_text())
    data = {"path": f"{root}/tokens", "sequence_length": 64, "max_tokens": 4000}
    prune = {**recipe["prune"], "model": f"{root}/models/teacher", "output": f"{root}/models/pruned", "data": data}
    prune |= {"calibration": {"samples": 16}, "consumers": ["transformers"]}
    small = {"model": f"{root}/models/student", "data": data, "consumers": ["transformers"]}
    int4 = {**recipe["quantize"]["int4-gptq"], **small, "output": f"{root}/models/int4"}
    q8_0 = {"scheme": "Q8_0", "model": small["model"], "data": data, "output": f"{root}/models/q8_0"}
    deepspeed = ["-m", "deepspeed.launcher.runner", "--log_level", "warning", "--num_accelerators", "2"]
    headrace = ["-m", "headrace"]
    models = [f"{name}={root}/models/{name}" for name in ("teacher", "int4")]
    measured = ["--data", f"{root}/tokens", "--batches", "0", "--max-tokens", "4000", "--consumers", "transformers"]
    found = [
        Stage("prep", [*headrace, "prep", "--workers", "2", *config("corpus", corpus)]),
        Stage("train", [*deepspeed, str(ROOT / "pipeline/train.py"), *config("teacher", teacher)]),
        Stage("export", [*headrace, "export", f"{root}/runs/teacher", f"{root}/models/teacher"], "models/teacher"),
        Stage("prune", [*headrace, "prune", *config("prune", prune)], "models/pruned"),
        Stage("cache-logits", [*headrace, "cache-logits", *config("student", student)]),
        Stage("distill", [*deepspeed, str(ROOT / "pipeline/distill.py"), *config("student", student)]),
        Stage(
            "export the student",
            [*headrace, "export", f"{root}/runs/student", f"{root}/models/student"],
            "models/student",
        ),
        Stage("quantize", [*headrace, "quantize", *config("int4", int4)], "models/int4"),
        Stage("gguf", [*headrace, "quantize", *config("q8_0", q8_0)], "models/q8_0"),
        Stage(
            "eval",
            [
                *headrace,
                "eval",
                *(word for each in models for word in ("--model", each)),
                *measured,
                "--csv",
                f"{root}/eval.csv",
            ],
        ),
    ]
    for name, of in (("tokens", "tokens"), ("run", "runs/student"), ("student", "models/int4")):
        found.append(Stage(f"card of {name}", [*headrace, "card", f"{root}/{of}", f"{root}/cards/{name}", "--replace"]))
    return found


def gather(corpus: Path) -> None:
    """Writes the text: two packages of the standard library, and the documents that the demo is scored on."""
    for folder in text_folders():
        shutil.copytree(folder, corpus / "stdlib" / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    (corpus / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents()))


class Killer:
    """Runs stages, and kills as many of them, each at a moment that a seed draws.

    Args:
        seed: seed of the random moments.
        kills: their number.
        faults: counts the requests to the store.
        seconds: stage -> what it took undisturbed.

    Attributes:
        killed: the stages that were killed.
        starts: number of commands that were started.
    """

    def __init__(self, seed: int, kills: int, *, faults: Faulty, seconds: Mapping[str, float]) -> None:
        self._random, self._faults, self._seconds = random.Random(seed), faults, seconds
        self._drawn = sorted(self._random.sample(range(len(seconds)), kills))
        self._left = kills
        self.killed: list[str] = []
        self.starts = 0

    def run(self, stage: Stage, number: int) -> None:
        """Runs a stage to its end, after it was killed if it is drawn, and for each one before that had ended first."""
        while True:
            kill = self._left > 0 and self._drawn[-self._left] <= number
            self.starts += 1
            with _started(stage) as running:
                if not kill or not self._killed(running.process, stage):
                    return running.finish()
            self._left -= 1
            self.killed.append(stage.name)
            check_bucket()
            if self._random.random() < 0.3:
                shutil.rmtree(os.environ[CACHE], ignore_errors=True)  # as on another host
            if stage.output and f"{stage.output}/{MANIFEST}" in objects_below(BUCKET):
                return None

    def _killed(self, process: subprocess.Popen[bytes], stage: Stage) -> bool:
        """Kills a stage after a part of its time, or at a write to the store; false where it had ended before."""
        at_write = self._random.randint(1, _WRITES) if self._random.random() < 0.5 else None
        began, writes = time.monotonic(), self._writes()
        end = began + (LIMIT_S if at_write else self._random.random() * self._seconds[stage.name])
        while process.poll() is None and time.monotonic() < end:
            if at_write is not None and self._writes() - writes >= at_write:
                break
            time.sleep(0.005)
        if process.poll() is not None:
            return False
        kill_tree(process)
        return True

    def _writes(self) -> int:
        return sum(method in ("PUT", "POST") for method, _ in self._faults.requests)


def run_local(work: Path) -> dict[str, float]:
    """The way in directories of this host; stage -> seconds."""
    gather(work / "local/corpus")
    seconds = {}
    for stage in stages(str(work / "local"), work / "configs-local"):
        began = time.monotonic()
        with _started(stage) as running:
            running.finish()
        seconds[stage.name] = time.monotonic() - began
    return seconds


def run_in_bucket(work: Path, killer: Killer) -> None:
    """The way in a bucket that is empty; raises AssertionError where a stage fails or leaves what it must not."""
    for path in (each for each in (work / "local/corpus").rglob("*") if each.is_file()):
        upload(path, f"{BUCKET}/{path.relative_to(work / 'local').as_posix()}")
    for number, stage in enumerate(stages(BUCKET, work / "configs-bucket")):
        killer.run(stage, number)


def check_bucket() -> None:
    """Every directory that has a manifest has all files of it, with their checksums."""
    names = objects_below(BUCKET)
    urls = [f"{BUCKET}/{folder}" for folder in _FOLDERS if f"{folder}/{MANIFEST}" in names]
    urls += [each.url for run in _RUNS for each in remote_checkpoints(f"{BUCKET}/{run}")]
    with tempfile.TemporaryDirectory() as work:
        for number, url in enumerate(urls):
            fetch(url, Path(work, str(number)))  # compares


def differences(local: Path) -> Iterator[str]:
    """What differs between the directories of this host and those of the bucket, where bytes are promised."""
    for folder in _FOLDERS:
        here, there = _files(local / folder), remote_manifest(f"{BUCKET}/{folder}").files
        yield from (f"{folder}/{name}" for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        left = objects_below(f"{BUCKET}/{folder}").keys() - there.keys() - {MANIFEST}
        yield from (f"{folder}/{name} is in no manifest" for name in left)
    for run in _RUNS:
        newest = max((local / run / "checkpoints").glob("step-*"))
        found = remote_checkpoints(f"{BUCKET}/{run}")[0]
        if f"step-{found.step:08d}" != newest.name:
            yield f"{run} ends with {found.url}"
        elif _files(newest) != remote_manifest(found.url).files:
            yield found.url
    yield from (f"{page} is missing" for page in _PAGES if page not in objects_below(BUCKET))


def _files(directory: Path) -> dict[str, Any]:
    """Bytes and SHA-256 of every file, by its manifest."""
    found: dict[str, Any] = json.loads((directory / MANIFEST).read_text())["files"]
    return found


def run_cell(cell: str, *, kills: int) -> tuple[bool, str]:
    """The whole way in a bucket, killed so often; whether it equals a local one. The cell is named by its seed."""
    seed = int(cell.rpartition(" ")[2])
    work, seconds = _undisturbed()
    faults = Faulty(seed)
    shutil.rmtree(work / "configs-bucket", ignore_errors=True)
    with environment({CACHE: str(work / f"cache-{seed}")}), s3_server("way", between=faults.between):
        killer = Killer(seed, kills, faults=faults, seconds=seconds)
        try:
            run_in_bucket(work, killer)
            found = list(differences(work / "local"))
        except (AssertionError, HeadraceError) as error:
            return False, str(error).strip().splitlines()[-1][:300]
    note = f"{len(killer.killed)} kills in {killer.starts} starts: {', '.join(killer.killed)}"
    return not found and len(killer.killed) == kills, note if not found else f"differs: {', '.join(found[:3])}; {note}"


@cache
def _undisturbed() -> tuple[Path, dict[str, float]]:
    work = Path(tempfile.mkdtemp(prefix="headrace-way-"))
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    return work, run_local(work)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGSTOP)  # it starts no more
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=10)
    process.wait()


@dataclass(frozen=True)
class Running:
    """A stage that was started, and the file that it writes to."""

    stage: Stage
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def finish(self) -> None:
        """Waits for its end; raises AssertionError where it fails or takes too long."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            kill_tree(self.process)
            code = -1
        self.output.seek(0)
        said = self.output.read().decode(errors="replace").strip()
        assert code == 0, f"{said[-6000:]}\n{self.stage.name} ended with {code}: {said.splitlines()[-2:]}"


@contextmanager
def _started(stage: Stage) -> Iterator[Running]:
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, *stage.words]
    with tempfile.TemporaryFile() as output:
        yield Running(stage, subprocess.Popen(words, cwd=ROOT, env=env, stdout=output, stderr=output), output)
