"""Removes stale locks of DeepSpeed's just-in-time compiled operators, and sets up DeepSpeed's process group.

torch does not remove its lock file when the compiling process is killed; the next process would wait for it forever,
without a message (torch/utils/file_baton.py). A live process keeps its lock file open.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import deepspeed
from torch.utils.cpp_extension import get_default_build_root

from foundation.lock import lock_file

OLD_S = 600.0
"""Seconds for which to keep a lock whose process may run on another host, where it cannot be checked."""

CONFIRM_S = 3.0
"""Seconds for which no process may have a lock open before it counts as stale. torch closes the file, then removes it,
and fails if it is already gone. On a busy machine the two were more than a second apart."""


def remove_stale_locks(root: Path | None = None, *, old_s: float = OLD_S) -> None:
    """Removes locks of dead processes, and waits for locks that another host may hold.

    Every rank calls it. Locks of live processes on this host are kept.

    Args:
        root: build directory of the operators; torch's default when None.
        old_s: seconds after which a lock on a shared file system counts as stale.
    """
    root = root or Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if not any(_locks(root)):
        return
    with ExitStack() as one_at_a_time:
        with suppress(OSError):  # a file system without locks
            held = lock_file(root / ".headrace.lock", doing=f"removing stale locks in {root}", timeout_s=math.inf)
            one_at_a_time.enter_context(held)
        for lock in _locks(root):
            _remove_if_stale(lock, old_s)


def set_up_deepspeed() -> None:
    """Lets DeepSpeed use the initialized process group, after removing stale locks of its operators."""
    remove_stale_locks()
    skip_shared_memory()
    logging.getLogger("DeepSpeed").addFilter(_is_not_about_untested_optimizers)
    deepspeed.init_distributed()


def compile_async_io() -> None:
    """Compiles the operator of offload to NVMe, unless it is compiled; this takes minutes on a busy machine.

    Processes forked from this one need not compile it.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder  # noqa: PLC0415

    remove_stale_locks()
    AsyncIOBuilder().load(verbose=False)


def skip_shared_memory() -> None:
    """Disables DeepSpeed's all-reduce through `/dev/shm` on the CPU, which it sets up by default.

    Only inference uses this all-reduce, and it ignores the group: it sums over all ranks
    (csrc/cpu/comm/shm_interface.cpp). It is compiled at the first start, and leaves 66 MiB per rank in memory when a
    process started by `deepspeed` ends. Processes forked from this one inherit the setting.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _is_not_about_untested_optimizers(record: logging.LogRecord) -> bool:
    """Drops DeepSpeed's warning about optimizers not in its list; tests/engines/test_layouts.py tests ours."""
    return "untested optimizer" not in str(record.msg)


def _locks(root: Path) -> list[Path]:
    return sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])


def _remove_if_stale(lock: Path, old_s: float) -> None:
    reported = False
    while (left := _seconds_left(lock, old_s)) is not None:
        if left <= 0:
            print(f"removing {lock}: the process that compiled there was killed", file=sys.stderr)
            lock.unlink(missing_ok=True)
            return
        if not reported:
            reported = True
            print(
                f"waiting for {lock}: another host may be compiling there\n"
                f"  it is removed in {left:.0f} s; if no process is compiling, delete it",
                file=sys.stderr,
            )
        time.sleep(1.0)


def _seconds_left(lock: Path, old_s: float) -> float | None:
    """Returns the seconds until a lock counts as stale; None if it is gone or a process on this host holds it."""
    try:
        first = lock.stat()
        if _is_held(lock):
            return None
        until = time.monotonic() + CONFIRM_S
        while time.monotonic() < until:
            time.sleep(0.2)
            if lock.stat().st_ino != first.st_ino or _is_held(lock):
                return None
    except FileNotFoundError:
        return None
    # network file systems, which several hosts may share, have device major number 0
    return old_s - (time.time() - first.st_mtime) if os.major(first.st_dev) == 0 else 0.0


def _is_held(lock: Path) -> bool:
    """Whether a process of this user on this host has the file open."""
    for opened in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # closed meanwhile, or another user's
            if opened.samefile(lock):
                return True
    return False
