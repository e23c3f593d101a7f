"""Recognises a checkpoint of another trainer by its files, and opens it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foundation.errors import CheckpointError
from foundation.foreign_folders import what_it_is
from pipeline.checkpoint.importing.dcp import read_dcp
from pipeline.checkpoint.importing.megatron import read_megatron
from pipeline.checkpoint.importing.replicated import read_replicated
from pipeline.checkpoint.importing.source import SourceCheckpoint, TargetModel
from pipeline.checkpoint.importing.trainer_folder import read_trainer
from pipeline.checkpoint.importing.universal import read_universal
from pipeline.checkpoint.importing.zero import read_zero

KNOWN = (
    "a checkpoint folder of DeepSpeed, the Hugging Face Trainer, accelerate, torchtitan, Megatron-core, or torch (DCP)"
)
Reader = Callable[[Path, TargetModel], SourceCheckpoint]


def check_known(folder: Path) -> Reader:
    """Returns the function that opens a folder.

    Raises:
        CheckpointError: the folder has no checkpoint of a known format.
    """
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file{what_it_is(folder, f'its folder, {folder.parent}, if that is {KNOWN}')}"
        )
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder\n  try: {KNOWN}")
    for marks, read in _READERS:
        if all(any(folder.glob(mark)) for mark in marks):
            return read
    raise CheckpointError(f"{folder} holds no checkpoint that can be imported{what_it_is(folder, KNOWN)}")


def open_checkpoint(folder: Path, wanted: TargetModel) -> SourceCheckpoint:
    """Opens a checkpoint of another trainer.

    Args:
        folder: folder of the checkpoint.
        wanted: the model of the config; its order of parameters resolves the numbers in optimizer states.

    Raises:
        CheckpointError: the folder has no checkpoint of a known format, or files are missing or damaged.
    """
    return check_known(folder)(folder, wanted)


_READERS: tuple[tuple[tuple[str, ...], Reader], ...] = (
    (("trainer_state.json",), read_trainer),
    (("zero/*", "*_model_states.pt"), read_universal),
    (("latest_universal", "*/zero"), read_universal),
    (("*_optim_states.pt",), read_zero),
    (("*/*_optim_states.pt",), read_zero),
    (("*mp_rank_*_model_states.pt",), read_replicated),
    (("*/*mp_rank_*_model_states.pt",), read_replicated),
    (("optimizer.bin",), read_trainer),
    (("optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata"), read_trainer),
    (("latest_checkpointed_iteration.txt",), read_megatron),
    (("metadata.json", ".metadata", "*.distcp"), read_megatron),
    ((".metadata", "*.distcp"), read_dcp),
    (("step-*/.metadata",), read_dcp),
)
"""Patterns that all have to match a path, and the function that opens such a folder; the first match is used."""
