"""Shares of a whole job, as the pods of an indexed Job run them: the output is that of one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_prep.job.share import _drop_finished
from tests.conftest import make_tokens, text_folders, write_config
from tests.support import wait_until

SHARES = 3
FIELDS = {"task_bytes": 60_000, "shard_tokens": 20_000}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(make_tokens(tmp_path_factory.mktemp("one"), text_folders(), **FIELDS))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    sources = [{"type": "text", "path": str(folder)} for folder in text_folders()]
    given = {"output": "tokens", "sources": sources, "tokenizer": {"train": "bpe", "vocab_size": 512}}
    return write_config(tmp_path / "corpus.json", {**given, "heldout_fraction": 0.15, "seed": 3, **FIELDS})


def contents(directory: Path) -> dict[str, bytes]:
    """The shards of an output and its tokenizer, by name."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files if path.name != "manifest.json"}


def start(config: Path, index: int) -> subprocess.Popen[str]:
    """Starts a share as a pod would: its number is in the environment."""
    command = [sys.executable, "-m", "data_prep", "share", "--config", config.name, "--of", str(SHARES)]
    env = os.environ | {"JOB_COMPLETION_INDEX": str(index)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=config.parent, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def finish(share: subprocess.Popen[str]) -> str:
    output, _ = share.communicate(timeout=120)
    assert share.returncode == 0, output
    return output


def test_shares_write_what_one_machine_writes_and_share_0_commits_it(config: Path, expected: dict[str, bytes]) -> None:
    outputs = [finish(share) for share in [start(config, index) for index in (2, 1, 0)]]
    assert "share 2 of 3: finished" in outputs[0]
    assert "fingerprint" in outputs[2]
    assert contents(config.parent / "tokens") == expected
    assert not (config.parent / ".tokens.job").exists()
    assert "finished" in finish(start(config, 1))  # a pod that comes back after the end


@pytest.mark.integration
@pytest.mark.parametrize("killed", [(0,), (1,), (0, 1, 2)])
def test_killed_shares_are_started_again_with_their_numbers(
    config: Path, expected: dict[str, bytes], killed: tuple[int, ...]
) -> None:
    shares = {index: start(config, index) for index in range(SHARES)}
    wait_until(lambda: any((config.parent / ".tokens.job/map").glob("*/done.json")), poll_s=0.005)
    for index in killed:
        shares[index].kill()
        shares[index].communicate()
        shares[index] = start(config, index)
    for share in shares.values():
        finish(share)
    assert contents(config.parent / "tokens") == expected


def test_a_share_waits_for_share_0_and_leaves_the_job_to_it(config: Path) -> None:
    second = start(config, 1)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(timeout=3)
    assert not (config.parent / ".tokens.job").exists()
    second.kill()
    second.communicate()


def test_a_number_that_is_not_among_the_shares_is_refused(config: Path) -> None:
    share = start(config, SHARES)
    output, _ = share.communicate(timeout=300)
    assert share.returncode == 2
    assert "--task from 0 to 2" in output


@dataclass
class CountedTask:
    looks: int = 0
    done: bool = False

    @property
    def finished(self) -> bool:
        self.looks += 1
        return self.done


def test_a_share_that_waits_looks_at_one_task_at_a_time() -> None:
    tasks = [CountedTask(done=number < 3) for number in range(1000)]
    left = deque(tasks)
    assert all(_drop_finished(left) for _ in range(10))
    assert sum(task.looks for task in tasks) == 3 + 10
    for task in tasks:
        task.done = True
    assert not _drop_finished(left)
