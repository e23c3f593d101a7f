"""Tracebacks of ranks that share a log, as in a Slurm job: each line names its rank."""

from __future__ import annotations

import os
import sys
import traceback

_WORLDS = {
    "RANK": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",  # SLURM_NTASKS is there in a batch script, too
}
"""Environment variable of the rank -> environment variable of the number of ranks."""


def is_one_of_several() -> bool:
    """Whether this process is a rank among others."""
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
