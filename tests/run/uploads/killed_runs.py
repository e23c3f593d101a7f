"""Runs in a bucket that are killed with SIGKILL again and again, with faults of the store between; see `rounds`."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.directory import read_manifest, verify
from foundation.remote_directory import CACHE, fetch
from foundation.remote_run import local_run, remote_checkpoints
from tests import warm, warm_python
from tests.conftest import entry_point, launch, losses, make_tokens, text_folders, tiny_config, write_config
from tests.object_store import Faulty, environment, s3_server

STEPS = 40
RANKS = 2
_SAID = re.compile(r"step (\d+): checkpoint uploaded to (\S+)")


def config_of(tokens: Path, work: Path, run_dir: str | Path, **run: Any) -> Path:
    """A run of two ranks' config, whose lease is out of date after 3 s."""
    section = {"dir": str(run_dir), "steps": STEPS, "seed": 7, "checkpoint_every": 5, "keep_checkpoints": 1, **run}
    watchdog = {"heartbeat_timeout": 3.0}
    config = tiny_config(tokens, work, run=section, engine="torch", watchdog=watchdog)
    return write_config(work / f"{Path(str(run_dir)).name}.json", config)


@dataclass(frozen=True)
class Started:
    """The ranks of a run, and the file that they write to."""

    ranks: list[subprocess.Popen[bytes]]
    output: Path

    def said(self) -> str:
        """What they have printed so far."""
        return self.output.read_text(errors="replace")

    def ended(self) -> bool:
        """Whether a rank has ended by itself."""
        return any(rank.poll() is not None for rank in self.ranks)

    def kill(self) -> None:
        """SIGKILL for all ranks; the process that uploads ends with rank 0."""
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                os.kill(warm_python.real_pid(rank.pid), signal.SIGKILL)
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def start(config: Path, *, caches: Sequence[Path] = ()) -> Started:
    """Starts the ranks.

    Args:
        config: the run's config.
        caches: HEADRACE_CACHE of every rank, each of which is then the only one of its node.
    """
    alone = [{CACHE: str(cache), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for cache in caches] or [{}] * RANKS
    environments = [env | own for env, own in zip(warm._environments(RANKS), alone, strict=True)]
    output = Path(tempfile.mkstemp(dir=config.parent, suffix=".out")[1])
    words = [warm_python.python(), *entry_point("train.py", config)]
    with output.open("ab") as file:
        options: dict[str, Any] = {"cwd": config.parent, "stdout": file, "stderr": file}
        ranks = [subprocess.Popen(words, env=env, **options) for env in environments]
    return Started(ranks, output)


def rounds(seed: int, count: int, *, faults: Faulty, cache: Path, config: Path, url: str) -> list[str]:
    """Kills a run at random moments, and returns what it has said to be in the store.

    After each kill every checkpoint that the store shows is whole, and all that were said to be there are.

    Args:
        seed: seed of the moments, the removed caches and the faults.
        count: number of kills.
        faults: between the run and the store.
        cache: cache of this host; removed before some starts, as if on another host.
        config: the run's config.
        url: the run's URL.
    """
    chance, said = random.Random(seed), list[str]()
    for _ in range(count):
        faults.rate = chance.choice([0.0, 0.1, 0.2])
        if chance.random() < 0.5:
            shutil.rmtree(cache, ignore_errors=True)
        run = start(config)
        _wait(run, lambda r=run: "resuming after" in r.said() or "steps =" in r.said(), within_s=90.0)
        moment = time.monotonic() + chance.uniform(0.0, 4.0)
        _wait(run, lambda m=moment: time.monotonic() > m, within_s=10.0)
        finished = run.ended()
        run.kill()
        faults.rate = 0.0
        if finished and "finished:" not in run.said():
            raise AssertionError(run.said())
        said += [found[2] for found in _SAID.finditer(run.said())]
        check_store(url, said)
    return said


def check_store(url: str, said: list[str]) -> None:
    """Compares every checksum of every checkpoint that is visible there, and what was said to be there with it."""
    there = [each.url for each in remote_checkpoints(url)]
    assert not set(said) - set(there), f"said to be durable, and not there: {set(said) - set(there)}"
    with tempfile.TemporaryDirectory() as work:
        for number, each in enumerate(there):
            path = Path(work, str(number))
            fetch(each, path)
            assert all(good for _, good in verify(path, read_manifest(path, kind="checkpoint")))


def finish(config: Path, url: str) -> dict[int, float]:
    """Runs to the end, and returns step -> loss from the store alone."""
    launch("train.py", config, processes=RANKS)
    return losses(local_run(url))


def run_cell(cell: str, *, kills: int) -> tuple[bool, str]:
    """A run that is killed so often, with a seed that the cell's name has; whether nothing was lost, and what was."""
    seed, url = int(cell.rpartition(" ")[2]), "s3://store/runs/killed"
    with tempfile.TemporaryDirectory(prefix="headrace-bucket-") as folder, environment({"AWS_MAX_ATTEMPTS": "1"}):
        work, faults = Path(folder), Faulty(seed)
        tokens = make_tokens(work, text_folders())
        launch("train.py", config_of(tokens, work, work / "local"), processes=RANKS)
        cache = work / "cache"
        with environment({CACHE: str(cache)}), s3_server("store", between=faults.between):
            config = config_of(tokens, work, url, keep_in_bucket="all")
            try:
                said = rounds(seed, kills, faults=faults, cache=cache, config=config, url=url)
                found = finish(config, url)
            except AssertionError as error:
                return False, str(error).strip().splitlines()[-1][:200]
            same = found == losses(work / "local")
            count = sum(number for kind, number in faults.injected.items() if kind != "none")
        note = f"{kills} kills, {count} faults of the store, {len(said)} checkpoints said durable"
        return same, note if same else f"other losses than undisturbed; {note}"


def _wait(run: Started, condition: Callable[[], bool], *, within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition() and not run.ended() and time.monotonic() < end:
        time.sleep(0.02)
