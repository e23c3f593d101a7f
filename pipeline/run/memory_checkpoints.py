"""Checkpoint copies in host memory (`run.in_memory_checkpoints`): set up at start, removed at the run's regular end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import ConfigError
from pipeline.checkpoint.memory.memory_copies import MemoryCopies
from pipeline.checkpoint.memory.memory_folder import MemoryFolder, remove, remove_left_behind, used
from pipeline.config.sections.run import RunSection

_KEY = "run.in_memory_checkpoints"


def memory_folder(section: RunSection) -> MemoryFolder | None:
    """Returns the memory folder of a run on this node; None if the run keeps no copies.

    Raises:
        ConfigError: the directory is missing, or cannot be written.
    """
    directory = section.in_memory_checkpoints
    if directory is None:
        return None
    if not Path(directory).is_absolute() or not Path(directory).is_dir() or not os.access(directory, os.W_OK):
        why = f"on {socket.gethostname()} it is no directory that can be written"
        raise ConfigError(_KEY, directory, why=why, remedy="use /dev/shm, or leave the key out")
    return MemoryFolder.of(directory, section.local_dir)


@dataclass(frozen=True)
class KeptCopies:
    """The memory folder of a run while this process uses it.

    Attributes:
        memory: the folder; None where the run keeps no copies.
    """

    memory: MemoryFolder | None

    def copier(self, *, rank: int, ranks_here: int) -> MemoryCopies | None:
        """Returns the copier of this rank's files; None if the run keeps no copies."""
        return None if self.memory is None else MemoryCopies(self.memory, rank=rank, ranks_here=ranks_here)


@contextmanager
def kept_copies(section: RunSection, say: Callable[[str], None]) -> Iterator[KeptCopies]:
    """Uses the folder of a run on this node, and removes leftovers of this user's dead runs beside it.

    The last process that uses the folder removes it at the end. After an error the folder stays, since the launcher may
    start the ranks again.

    Args:
        section: the config's `run`.
        say: prints lines for people.

    Raises:
        ConfigError: the folder cannot be made.
    """
    memory = memory_folder(section)
    if memory is None:
        yield KeptCopies(None)
        return
    with _used(memory):
        for run_dir in remove_left_behind(memory):
            say(f"removed the checkpoint copies of {run_dir} from {memory.root}: no process of it was left here")
        yield KeptCopies(memory)
    remove(memory)


@contextmanager
def _used(memory: MemoryFolder) -> Iterator[None]:
    folder = used(memory)
    try:
        folder.__enter__()
    except OSError as error:
        where = f"{memory.root} on {socket.gethostname()}"
        why = f"{where} cannot be made: {error}"
        raise ConfigError(_KEY, str(memory.root.parent), why=why, remedy="remove it, or leave the key out") from None
    try:
        yield
    finally:
        folder.__exit__(None, None, None)
