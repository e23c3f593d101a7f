"""Code that all command lines share: `--config`, `--set`, and errors that end a process without a traceback."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from foundation.errors import EXIT_INTERRUPTED, EXIT_LOST, DataError, HeadraceError
from foundation.link_errors import is_link_error
from foundation.paths import LOCAL

ERROR_FILE = "HEADRACE_ERROR_FILE"
"""Environment variable with a file for a rank's error: a launcher of several ranks then shows the error once."""
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_JOB = "SLURM_JOB_ID"
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLDS = {
    "RANK": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",  # SLURM_NTASKS is set in batch scripts, too
}
"""Environment variable of the rank -> environment variable of the number of ranks."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--config FILE` (required) and `--set KEY=VALUE` (repeatable)."""
    parser.add_argument("--config", required=True, metavar="FILE", type=LOCAL, help="the config: JSON or YAML")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one field, e.g. --set run.steps=100 (repeatable)",
    )


def leave(code: int) -> NoReturn:
    """Ends the process at once, after flushing its output.

    Use it for processes that had a process group: all files are closed by then. The interpreter would only tear down
    gloo's threads, which has been seen to end in SIGABRT after a successful run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def guarded(main: Callable[[], int | None]) -> int:
    """Runs `main` and returns its exit code; a user error becomes a message on stderr and its exit code.

    A broken link to another rank gives `EXIT_LOST` after its traceback: the run can be started again unchanged.

    With several ranks the message names its rank, to distinguish a thousand identical messages.
    """
    try:
        return main() or 0
    except HeadraceError as error:
        _tell(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has gone (`... | head`): no message is needed, and none would be read
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        refusal = _storage_error(error)
        if refusal is not None:
            _tell(refusal)
            return refusal.exit_code
        lost = is_link_error(error)
        if ERROR_FILE in os.environ:
            Path(os.environ[ERROR_FILE]).write_text(traceback.format_exc())
        elif lost or is_one_of_several():
            print_traceback()
        else:
            raise
        return EXIT_LOST if lost else 1


def _storage_error(error: Exception) -> DataError | None:
    """Describes a full disk, exceeded quota, read-only file system or missing permission; None for other errors.

    safetensors raises an error of its own, with the errno only in its text.
    """
    number = error.errno if isinstance(error, OSError) else None
    if type(error).__name__ == "SafetensorError":
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else None
    if number not in _STORAGE:
        return None
    place = f"{name}: " if (name := getattr(error, "filename", None)) else ""
    full = number in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free space there, then run again" if full else "check the path and its permissions"
    return DataError(f"{place}{os.strerror(number)}\n  try: {remedy}")


def _tell(error: HeadraceError) -> None:
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    if ERROR_FILE in os.environ:
        Path(os.environ[ERROR_FILE]).write_text(f"error: {error}")
    elif rank == "0":
        # people and monitors first read the last line of a job's output
        last = f"\nreason: {error.cause}" if _JOB in os.environ else ""
        print(f"error: {error}{last}", file=sys.stderr, flush=True)
    else:
        # with the remedy: some launchers end rank 0 before it has printed its message
        brief = "; ".join(line.strip() for line in str(error).splitlines()[:3])
        print(f"error (rank {rank}): {brief}", file=sys.stderr, flush=True)


def is_one_of_several() -> bool:
    """Whether this process is one of several ranks."""
    return _rank_of_several() is not None


def print_traceback() -> None:
    """Prints the current traceback in one write; if there are several ranks, with `[rank N]` on every line."""
    text = traceback.format_exc()
    rank = _rank_of_several()
    if rank is not None:
        text = "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())
    sys.stderr.write(text)
    sys.stderr.flush()


def _rank_of_several() -> str | None:
    name = next((name for name in _WORLDS if name in os.environ), None)
    size = "1" if name is None else os.environ.get(_WORLDS[name], "1")
    return os.environ[name] if name is not None and size.isdigit() and int(size) > 1 else None
