"""A file system that becomes slow while a run reads from it shows as data wait in the run's metrics."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_prep.formats.tokenfile import TokenFileWriter, dtype_for, shard_name, shard_prefix
from foundation.directory import commit, fresh_staging
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import entry_point, tiny_config, write_config
from tests.support import wait_until

BLKIO = Path("/sys/fs/cgroup/blkio")
_LIMIT = 512 << 10
"""Bytes per second. A step of 512 samples reads as many pages of 4 kB, about 2 MB."""
_AHEAD = 4 + 2 * 4
"""Steps that are read or asked for ahead: those prepared, and two groups of 2,048 rows."""


def device_of(path: Path) -> str | None:
    """MAJOR:MINOR of the disk below a path; None where it is not on one that can be throttled."""
    number = path.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    return name if Path(f"/sys/dev/block/{name}").exists() else None


@contextlib.contextmanager
def control_group() -> Iterator[Path]:
    group = BLKIO / f"headrace-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"throttling a disk needs root and cgroups v1: {error}")
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (BLKIO / "cgroup.procs").write_text(pid)
        group.rmdir()


def write_random(directory: Path, *, tokens: int) -> Path:
    """A tokens directory of random ids below 512, uint16, in one shard for each split."""
    staging, splits = fresh_staging(directory), {}
    for split, size in (("train", tokens), ("heldout", 10_000)):
        (staging / split).mkdir()
        with TokenFileWriter(shard_prefix(staging, split, 0), dtype=dtype_for(512)) as writer:
            writer.append(np.random.default_rng(0).integers(1, 512, size, dtype=np.uint16))
        counts = {"documents": 1, "tokens": size, "bytes": size}
        splits[split] = {**counts, "shards": [{"name": shard_name(0), **counts}]}
    tokenizer = {"fingerprint": "random", "vocab_size": 512, "bos_id": None, "eos_id": 0, "pad_id": None}
    commit(staging, directory, kind="tokens", config={}, details={"tokenizer": tokenizer, "splits": splits})
    return directory


def forget(directory: Path) -> None:
    """Writes files to disk and drops them from the page cache."""
    for path in directory.rglob("*.bin"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def steps(run_dir: Path) -> list[dict[str, float]]:
    return read_rows(run_dir, kind="step")


def share_waited(rows: list[dict[str, float]]) -> float:
    """Of the time of steps, what was waited for data."""
    return sum(row["data_wait_seconds"] for row in rows) / sum(row["seconds"] for row in rows)


@pytest.mark.integration
@pytest.mark.skipif(not BLKIO.is_dir(), reason="throttling a disk needs cgroups v1 (blkio)")
@pytest.mark.sweep
def test_a_disk_that_becomes_slow_shows_as_data_wait(tmp_path: Path) -> None:
    device = device_of(tmp_path)
    if device is None:
        pytest.skip(f"{tmp_path} is on no disk that can be throttled")
    tokens = write_random(tmp_path / "tokens", tokens=100_000_000)  # 50,000 pages, of which a step reads 512
    config = tiny_config(tokens, tmp_path / "run", engine="torch", scheduler=None)
    config |= {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 256}
    config["data"]["sequence_length"] = 16
    config["run"] |= {"steps": 100_000, "checkpoint_every": 100_000}
    config["model"]["config"] |= {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    path, log = write_config(tmp_path / "c.json", config), tmp_path / "log"
    forget(tokens)
    with control_group() as group, log.open("wb") as output:
        command = [sys.executable, *entry_point("train.py", path)]
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path)
        try:
            (group / "cgroup.procs").write_text(str(process.pid))
            wait_until(lambda: len(steps(tmp_path / "run")) >= 10, process=process, said=log.read_text)
            (group / "blkio.throttle.read_bps_device").write_text(f"{device} {_LIMIT}")
            quick = steps(tmp_path / "run")
            count = len(quick) + _AHEAD + 6
            wait_until(lambda: len(steps(tmp_path / "run")) >= count, process=process, said=log.read_text)
        finally:
            process.kill()
            process.wait()
    slow = steps(tmp_path / "run")[len(quick) + _AHEAD :]
    print(f"waited {share_waited(quick[5:]):.3f} of the time before, {share_waited(slow):.3f} after; {slow[-1]}")
    assert share_waited(slow) > 0.5
    assert share_waited(slow) > 2 * share_waited(quick[5:])
