"""Time in which a restart has verified and read its checkpoint: from host memory, from files, from a slow file system.

    python -m benchmarks.memory_restart [--parameters 50e6] [--rounds 6] [--dir DIRECTORY] [--megabytes-per-second 25]

One process, 12 bytes per parameter. Each round reads the same checkpoint in every way, one after the other, by the code
of a run: find the newest intact checkpoint, then fill the state. Before each "cold" reading the pages of its files are
dropped from the page cache (posix_fadvise), so that they come from the disk below --dir. Where this process may limit
the bandwidth of that disk for itself (root, blkio of cgroups version 1), "throttled" is the same at
--megabytes-per-second: a slow disk, not a file system on a network, whose latency, other nodes and metadata servers are
not in it. Printed are medians with quartiles, of seconds and of the ratio to memory in the same round, and the bytes
that the kernel has read from the disk for this process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.checkpoint import make_state, spread
from pipeline.checkpoint import named_state
from pipeline.checkpoint.checkpoint import CheckpointInfo
from pipeline.checkpoint.format.shard_table import State
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.memory.memory_copies import MemoryCopies
from pipeline.checkpoint.memory.memory_folder import MemoryFolder, remove, used
from pipeline.checkpoint.memory.restart_files import RestartFiles
from pipeline.checkpoint.save import CheckpointWriter
from pipeline.checkpoint.store import CheckpointStore

_BLKIO = Path("/sys/fs/cgroup/blkio")


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=50e6)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dir", default=".", help="a directory on the disk to measure; default: the working directory")
    parser.add_argument("--megabytes-per-second", type=float, default=25.0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is")
    state: State = {
        key: NamedShard(tuple(value.shape), start=0, values=value.view(-1))
        for key, value in make_state(int(arguments.parameters)).items()
    }
    with tempfile.TemporaryDirectory(dir=arguments.dir) as work:
        run_dir, memory = Path(work), MemoryFolder.of("/dev/shm", Path(work))
        with used(memory):
            size = save(run_dir, memory, state)
            times = measure(run_dir, memory, state, arguments.rounds, arguments.megabytes_per_second)
        remove(memory)
    table(times, megabytes=size / 1e6)


def save(run_dir: Path, memory: MemoryFolder, state: State) -> int:
    """Writes a checkpoint and its copy; returns the bytes of the shards' file."""
    writer = CheckpointWriter(CheckpointStore(run_dir, keep=1), copies=MemoryCopies(memory, rank=0, ranks_here=1))
    writer.begin(CheckpointInfo(1, {}, {}, {}), lambda: state)
    result = writer.wait()
    writer.wait_for_copy()
    assert result is not None
    assert result.checkpoint is not None, result.failure
    assert memory.sizes(1), result.not_copied
    return sum(memory.sizes(1).values())


def measure(
    run_dir: Path, memory: MemoryFolder, state: State, rounds: int, megabytes_per_second: float
) -> dict[str, list[tuple[float, int]]]:
    """Way -> seconds, and bytes from the disk, of each round; the first round is not counted."""
    times: dict[str, list[tuple[float, int]]] = {}

    def note(way: str, copies: MemoryFolder | None, *, cold: bool, counted: bool) -> None:
        if cold:
            drop_pages(run_dir)
        began, before = time.perf_counter(), disk_bytes()
        restart(run_dir, state, copies)
        if counted:
            times.setdefault(way, []).append((time.perf_counter() - began, disk_bytes() - before))

    for number in range(rounds + 1):
        counted = number > 0
        note("memory", memory, cold=False, counted=counted)
        note("files in the page cache", None, cold=False, counted=counted)
        note("files, cold", None, cold=True, counted=counted)
        with throttled(run_dir, megabytes_per_second) as possible:
            if possible:
                note(f"files, cold, throttled to {megabytes_per_second:g} MB/s", None, cold=True, counted=counted)
    return times


def restart(run_dir: Path, state: State, memory: MemoryFolder | None) -> None:
    """Finds the checkpoint and reads it, as a run does."""
    files = RestartFiles(memory)
    newest = CheckpointStore(run_dir, keep=1).newest_intact(print, files=files)
    assert newest is not None
    with files.opened(newest.path, newest.manifest.files) as opened:
        named_state.read(state, newest.path, files=opened)
    read, _ = files.report()
    assert read["memory" if memory else "run_dir"] > 0
    assert read["run_dir" if memory else "memory"] == 0


def drop_pages(folder: Path) -> None:
    """Drops the pages of all files from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


@contextmanager
def throttled(folder: Path, megabytes_per_second: float) -> Iterator[bool]:
    """Limits what this process reads from the disk of a folder; False where it may not."""
    group, own = _BLKIO / f"headrace-{os.getpid()}", str(os.getpid())
    device = folder.stat().st_dev
    before = next((path for path in _groups() if path.startswith("blkio:")), "blkio:/").partition(":")[2]
    try:
        group.mkdir()
        limit = f"{os.major(device)}:{os.minor(device)} {int(megabytes_per_second * 1e6)}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(own)
    except OSError as error:
        print(f"not throttled: {error}")
        yield False
        return
    try:
        yield True
    finally:
        (_BLKIO / before.lstrip("/") / "cgroup.procs").write_text(own)
        group.rmdir()


def _groups() -> list[str]:
    """controllers:path of the cgroups of this process."""
    return [line.partition(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]


def disk_bytes() -> int:
    """Bytes that were read from disks for this process so far."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"])


def table(times: dict[str, list[tuple[float, int]]], *, megabytes: float) -> None:
    """Prints the figures."""
    base = times["memory"]
    print(f"{megabytes:,.0f} MB, torch {torch.__version__}\n")
    print("| read from | seconds | ratio to memory | from the disk, MB |")
    print("|---|---|---|---|")
    for way, rows in times.items():
        ratios = [one / other for (one, _), (other, _) in zip(rows, base, strict=True)]
        disk = statistics.median(nbytes for _, nbytes in rows) / 1e6
        print(f"| {way} | {spread([seconds for seconds, _ in rows])} | {spread(ratios)} | {disk:,.0f} |")


if __name__ == "__main__":
    main()
