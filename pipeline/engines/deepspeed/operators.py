"""The operators that DeepSpeed compiles when it first needs them, and the locks that it does so under.

torch does not remove its lock file when it is killed; whoever comes next would wait for it without end and without a
word (torch/utils/file_baton.py). A process that lives has its lock file open.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import deepspeed
from torch.utils.cpp_extension import get_default_build_root

OLD_S = 600.0
"""A lock whose process cannot be seen, since it may be on another host, is left alone for so long."""


def remove_stale_locks(root: Path | None = None, *, old_s: float = OLD_S) -> None:
    """Removes locks of processes that are gone, and waits for those that another host may hold.

    Every rank calls it. Locks of living processes on this host stay.

    Args:
        root: where operators are compiled; as torch chooses it when None.
        old_s: seconds after which a lock on a shared file system counts as left behind.
    """
    root = root or Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if not any(_locks(root)):
        return
    with (root / ".headrace.lock").open("w") as one_at_a_time:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        for lock in _locks(root):
            _remove_if_stale(lock, old_s)


def set_up_deepspeed() -> None:
    """DeepSpeed takes over the open process group, and waits for no lock that a killed process left."""
    remove_stale_locks()
    skip_shared_memory()
    deepspeed.init_distributed()


def skip_shared_memory() -> None:
    """On the CPU, DeepSpeed shall not set up its all-reduce through `/dev/shm`, which it does unasked.

    Inference alone uses it, and whatever the group it sums over all ranks (csrc/cpu/comm/shm_interface.cpp). It is
    compiled at the first start, and leaves 66 MiB per rank in memory when a process started by `deepspeed` ends.
    Processes forked from this one inherit the decision.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _locks(root: Path) -> list[Path]:
    return sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])


def _remove_if_stale(lock: Path, old_s: float) -> None:
    told = False
    while (left := _seconds_left(lock, old_s)) is not None:
        if left <= 0:
            print(f"removing {lock}: the process that compiled there was killed", file=sys.stderr)
            lock.unlink(missing_ok=True)
            return
        if not told:
            told = True
            print(
                f"waiting for {lock}: another host may be compiling there\n"
                f"  it is removed in {left:.0f} s; if nobody compiles, delete it",
                file=sys.stderr,
            )
        time.sleep(1.0)


def _seconds_left(lock: Path, old_s: float) -> float | None:
    """Seconds until a lock counts as left behind; None when it is gone, or held by a process on this host."""
    try:
        first = lock.stat()
        if _is_held(lock):
            return None
        time.sleep(0.2)  # whoever is done closes the file before removing it
        if lock.stat().st_ino != first.st_ino or _is_held(lock):
            return None
    except FileNotFoundError:
        return None
    # file systems that several hosts may share have no disk of their own
    return old_s - (time.time() - first.st_mtime) if os.major(first.st_dev) == 0 else 0.0


def _is_held(lock: Path) -> bool:
    """Whether a process of this user on this host has the file open."""
    for opened in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # closed meanwhile, or another user's
            if opened.samefile(lock):
                return True
    return False
