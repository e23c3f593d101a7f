"""The file for a rank's output, and its rotation: a run of months must not fill a disk."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

LOG_FILE = "HEADRACE_LOG_FILE"
"""Variable that names the file to the processes whose output it is."""

LIMIT = 16 << 20
"""Bytes above which a log is rotated. The log and its predecessor are kept: 32 MiB a rank."""


def log_variable(output: Path | None) -> dict[str, str]:
    """Returns the variable for a process that appends its output to this file; empty without a file."""
    return {} if output is None else {LOG_FILE: str(output.absolute())}


def rotate_log(environ: Mapping[str, str] = os.environ, *, limit: int = LIMIT) -> bool:
    """Moves this process's log to NAME.1, replacing the old one, if it exceeds the limit.

    The content is copied and the file emptied: processes that append to it (children, a launcher) go on. A line that
    another process writes in the microseconds between copy and truncation is lost. Files opened by a shell or Slurm are
    left alone.

    Args:
        environ: environment variables, with `LOG_FILE` if the file is ours.
        limit: largest size in bytes.

    Returns:
        Whether it was rotated. A full disk or a missing folder leaves the log as it is.
    """
    name = environ.get(LOG_FILE)
    if name is None or os.fstat(1).st_size <= limit:
        return False
    log = Path(name)
    with suppress(OSError):
        if not os.path.samestat(os.fstat(1), log.stat()) or not fcntl.fcntl(1, fcntl.F_GETFL) & os.O_APPEND:
            return False
        copy = log.with_name(f"{log.name}.1.new")
        with log.open("rb") as source, copy.open("wb") as target:
            while target.tell() < os.fstat(1).st_size:
                shutil.copyfileobj(source, target)
        os.ftruncate(1, 0)
        copy.replace(log.with_name(f"{log.name}.1"))
        return True
    return False
