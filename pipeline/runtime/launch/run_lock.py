"""Lets one process at a time train in a run's directory: by a lock, or by a lease where there are no file locks."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from foundation.errors import ConfigError, DataError
from foundation.lease import FOLDER, SILENT_S, LeaseLostError, LeaseTakenError, held, newest_lease
from foundation.lock import LockedError, NoLocksError, is_locked, lock_file
from pipeline.runtime.faults.end_processes import exit_now
from pipeline.runtime.faults.report import print_report
from pipeline.runtime.launch.environment import AGENT_STARTS

LOCK = ".lock"
"""Name of the lock file in a run's directory."""


@contextmanager
def exclusive_run(run_dir: Path, *, lost: Callable[[LeaseLostError], object] = lambda _error: None) -> Iterator[None]:
    """Keeps a second run out of the run's directory. The lock ends with the process, however it ends.

    Args:
        run_dir: the run's directory.
        lost: called before this process ends because another process has taken over its lease.
    """
    _make_lock(run_dir)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_file(run_dir / LOCK, doing=f"training in {run_dir}", timeout_s=_patience_s()))
        except LockedError:
            raise _refusal(run_dir, "another process is training there") from None
        except NoLocksError as error:
            _say(f"warning: {str(error).splitlines()[0]}: a lease in {run_dir / FOLDER} takes the lock's place")
            _take_lease(run_dir, stack, lost)
        yield


def _take_lease(run_dir: Path, stack: ExitStack, lost: Callable[[LeaseLostError], object]) -> None:
    """Holds a lease until the stack is closed; if the lease is lost, ends this process before it writes more."""

    def end(error: LeaseLostError) -> None:
        print_report(f"error: {error}")
        lost(error)
        exit_now(error.exit_code)

    deadline, token = time.monotonic() + _patience_s(), secrets.token_hex(16)
    while True:
        try:
            stack.enter_context(held(str(run_dir), token=token, silent_s=SILENT_S, say=_say, lost=end))
            return
        except LeaseTakenError as error:
            if time.monotonic() > deadline:
                why = str(error).splitlines()[0].removeprefix(f"{run_dir}: ")
                raise _refusal(run_dir, why) from None
            time.sleep(1.0)


def is_training(run_dir: Path) -> bool | None:
    """Tells whether a process holds the run's directory; None where there are neither file locks nor a lease."""
    training = is_locked(run_dir / LOCK)
    if training is None:
        with suppress(DataError, FileNotFoundError):
            lease, renewed_at = newest_lease(str(run_dir)), (run_dir / FOLDER).stat().st_mtime
            if lease is not None:
                return not lease.released and time.time() - renewed_at < lease.silent_s
    return training


def _refusal(run_dir: Path, why: str) -> ConfigError:
    return ConfigError("run.dir", str(run_dir), why=why, remedy="wait for it, or choose another run.dir")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _make_lock(run_dir: Path) -> None:
    """Makes the lock file and its directory; only the attempt shows whether one can write (procfs, a full disk)."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / LOCK).open("a").close()
    except OSError as error:
        why = f"it cannot be written: {error.strerror}"
        raise ConfigError(
            "run.dir", str(run_dir), why=why, remedy="free space there, or choose another run.dir"
        ) from None


def _patience_s() -> float:
    """Returns the seconds to wait for the lock: its holder from before a restart may live a moment longer.

    NFS keeps the lock of a failed node for the duration of NFS's lease (90 s on Linux).
    """
    again = {"SLURM_RESTART_COUNT": "0", "TORCHELASTIC_RESTART_COUNT": "0", AGENT_STARTS: "1"}
    restarted = any(os.environ.get(name, first) != first for name, first in again.items())
    return 120.0 if restarted else 10.0
