"""Copies of a rank's newest checkpoint file in host memory, made by a thread after the file itself is written.

    prepare     before a save is written: checks that there is room for the copies of this node's ranks
    start       when the rank's file is written: a thread writes the same shards again, into memory
    committed   once the checkpoint is complete: removes the copies of earlier checkpoints

A failed copy is reported, and does not affect the checkpoint. There are at most two copies at any time; without room
for two, the earlier copy is removed before the next is made.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from foundation.errors import CheckpointError
from foundation.memory_size import available_memory
from pipeline.checkpoint.format.naming import step_of
from pipeline.checkpoint.memory.memory_folder import MemoryFolder
from pipeline.checkpoint.write.plan import WritePlan
from pipeline.checkpoint.write.write_shards import write_shards

Lookup = Callable[[WriteItem], Tensor]
MARGIN = 0.1
"""Fraction of the tmpfs, host memory and cgroup limit to keep free, since NCCL and gloo use them, too."""
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


class MemoryCopies:
    """Copies the checkpoint files of one rank into memory.

    Args:
        memory: folder of the run, in use by this process.
        rank: rank of this process.
        ranks_here: number of ranks that copy into this folder.
    """

    def __init__(self, memory: MemoryFolder, *, rank: int, ranks_here: int) -> None:
        self._memory, self._rank, self._ranks_here = memory, rank, ranks_here
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-copy")
        self._job: Future[None] | None = None
        self._stopped = threading.Event()
        self._wanted, self._drop_first = False, False
        self._failure: str | None = None

    def prepare(self, step: int, nbytes: int) -> None:
        """Decides whether the next file is copied; must be called while no rank copies.

        Args:
            step: step of the checkpoint.
            nbytes: bytes of this rank's shards, about the same on all ranks.
        """
        need = nbytes * self._ranks_here
        try:
            free = room(self._memory.path)
            earlier = sum(sum(self._memory.sizes(each).values()) for each in self._steps() if each < step)
        except OSError as error:
            self._wanted, self._failure = False, str(error)
            return
        self._drop_first = need > free
        self._wanted = need <= free + earlier
        if not self._wanted:
            self._failure = (
                f"the copies of this node take {need / 1e9:.3g} GB, and {max(0, free) / 1e9:.3g} GB of"
                f" {self._memory.root.parent} and of the host's memory are free for them"
            )

    def start(self, step: int, plan: WritePlan, lookup: Lookup, sha256: Mapping[str, str]) -> None:
        """Begins to copy; does nothing if `prepare` found no room.

        Args:
            step: step of the checkpoint.
            plan: plan of the shards to write.
            lookup: returns a shard's values, which must not change until `stop` or `wait` has returned.
            sha256: file name -> checksum of the files that were written.
        """
        if self._wanted:
            self._stopped.clear()
            with suppress(RuntimeError):  # the process is ending
                self._job = self._thread.submit(self._copy, step, plan, lookup, sha256)

    def stop(self) -> None:
        """Cancels a copy in progress; returns when the copy no longer uses the shards' values."""
        self._stopped.set()
        self.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until no copy is in progress; returns False after a timeout."""
        return self._job is None or not futures.wait([self._job], timeout=timeout_s).not_done

    def committed(self, step: int) -> None:
        """Removes the copies of earlier checkpoints."""
        self._memory.drop_before(step)

    def discard(self, step: int) -> None:
        """Removes the copy of a checkpoint that was not committed."""
        self.stop()
        self._failure = None  # the failure of the save is reported
        self._remove_own(step)

    def failure(self) -> str | None:
        """Returns why a copy has failed or was left out since the last call; None if no copy was."""
        failure, self._failure = self._failure, None
        return failure

    def _copy(self, step: int, plan: WritePlan, lookup: Lookup, sha256: Mapping[str, str]) -> None:
        partial, folder = self._memory.partial(step, self._rank), self._memory.folder(step)

        def value(item: WriteItem) -> Tensor:
            if self._stopped.is_set():
                raise _StoppedError
            return lookup(item)

        try:
            if self._drop_first:
                for each in self._steps():
                    if each < step:
                        self._remove_own(each)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
            written = write_shards(plan, value, partial)
            if written.sha256 != sha256:
                raise CheckpointError("the copy in memory has another checksum than the file")
            folder.mkdir(mode=0o700, exist_ok=True)
            for name in written.sha256:
                (partial / name).replace(folder / name)
        except _StoppedError:
            self._failure = "the copy was not finished when the next checkpoint began"
        except (OSError, RuntimeError, CheckpointError) as error:
            self._failure = (str(error) or repr(error)).splitlines()[0]
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _steps(self) -> list[int]:
        found = (step_of(path.name) for path in self._memory.path.iterdir())
        return [step for step in found if step is not None]

    def _remove_own(self, step: int) -> None:
        for path in self._memory.folder(step).glob(f"__{self._rank}_*"):
            path.unlink(missing_ok=True)


class _StoppedError(Exception):
    """Raised in a copy that is cancelled because the next save needs the buffers."""


def room(directory: Path) -> int:
    """Returns the bytes that may be written into a directory of a tmpfs; negative if less than the margin is free."""
    disk = os.statvfs(directory)
    found = [disk.f_bavail * disk.f_frsize - int(MARGIN * disk.f_blocks * disk.f_frsize)]
    with suppress(OSError, AssertionError):
        meminfo = Path("/proc/meminfo").read_text()
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found.append(available_memory(meminfo) - int(MARGIN * total))
    with suppress(OSError, ValueError):
        found += _of_cgroups(Path("/proc/self/cgroup").read_text(), _CGROUPS)
    return min(found)


def _of_cgroups(own: str, mounted: Path) -> Iterator[int]:
    """Yields the free bytes, less the margin, of each limited cgroup that this process is in.

    Args:
        own: the contents of /proc/self/cgroup.
        mounted: directory where cgroups are mounted.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = mounted, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = mounted / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inside = root / path.lstrip("/")
        # in a container, the path is the host's, and the cgroup of this process is the root of the mount
        for folder in [inside, *inside.parents] if inside.is_dir() else [root]:
            if folder != root and root not in folder.parents:
                break
            with suppress(OSError, ValueError):
                limit, usage = (int((folder / name).read_text()) for name in names)  # "max": no limit
                if limit < _UNLIMITED:
                    yield limit - usage + _reclaimable(folder) - int(MARGIN * limit)


def _reclaimable(folder: Path) -> int:
    """Returns the bytes of cached files that the kernel drops when memory is short."""
    rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
