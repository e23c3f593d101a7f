"""Recognises a checkpoint of another trainer by its files, and opens it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.base.errors import CheckpointError
from headrace.base.foreign_folders import what_it_is
from pipeline.checkpoint.importing.source import SourceCheckpoint
from pipeline.checkpoint.importing.universal import read_universal
from pipeline.checkpoint.importing.zero import read_zero

KNOWN = "a checkpoint folder of DeepSpeed"


def open_checkpoint(folder: Path) -> SourceCheckpoint:
    """Opens a checkpoint of another trainer.

    Raises:
        CheckpointError: nothing known is there, or its files are missing or damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder\n  try: {KNOWN}")
    for is_of, read in _READERS:
        if is_of(folder):
            return read(folder)
    raise CheckpointError(f"{folder} holds no checkpoint that is known{what_it_is(folder, KNOWN)}")


def _has(*patterns: str) -> Callable[[Path], bool]:
    return lambda folder: all(any(folder.glob(pattern)) for pattern in patterns)


_READERS: tuple[tuple[Callable[[Path], bool], Callable[[Path], SourceCheckpoint]], ...] = (
    (_has("zero/*", "*_model_states.pt"), read_universal),
    (_has("latest_universal", "*/zero"), read_universal),
    (_has("*_optim_states.pt"), read_zero),
    (_has("*/*_optim_states.pt"), read_zero),
)
"""The first that recognises a folder opens it."""
