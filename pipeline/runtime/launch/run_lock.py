"""One process at a time trains in a run's directory."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from headrace.base.errors import ConfigError
from headrace.base.lock import LockedError, lock_file
from pipeline.runtime.launch.environment import AGENT_STARTS

LOCK = ".lock"
"""Name of the lock file in a run's directory."""


@contextmanager
def exclusive_run(run_dir: Path) -> Iterator[None]:
    """Holds the run's directory against a second run. The lock goes with the process, however it ends."""
    _make_lock(run_dir)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_file(run_dir / LOCK, doing=f"training in {run_dir}", timeout_s=_patience_s()))
        except LockedError:
            why = "another process is training there"
            raise ConfigError(
                "run.dir", str(run_dir), why=why, remedy="wait for it, or choose another run.dir"
            ) from None
        except OSError as error:  # a file system without locks, such as Lustre mounted without flock
            print(
                f"warning: {run_dir} cannot be locked ({error}): see to it that only one run uses it", file=sys.stderr
            )
        yield


def is_training(run_dir: Path) -> bool | None:
    """Whether a process holds the run's directory; None where the file system has no locks.

    The lock is taken shared and given back at once: a run that starts at that moment waits longer than that.
    """
    with suppress(FileNotFoundError), (run_dir / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
    return False


def _make_lock(run_dir: Path) -> None:
    """Makes the file and its directory: on some file systems (procfs, a full disk) only the attempt shows."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / LOCK).open("a").close()
    except OSError as error:
        why = f"it cannot be written: {error.strerror}"
        raise ConfigError(
            "run.dir", str(run_dir), why=why, remedy="free space there, or choose another run.dir"
        ) from None


def _patience_s() -> float:
    """Seconds to wait for the lock: the rank that held it before a restart may live for a moment longer.

    Of a node that has failed, NFS knows no better for as long as its lease lasts (90 s on Linux).
    """
    again = {"SLURM_RESTART_COUNT": "0", "TORCHELASTIC_RESTART_COUNT": "0", AGENT_STARTS: "1"}
    restarted = any(os.environ.get(name, first) != first for name, first in again.items())
    return 120.0 if restarted else 10.0
