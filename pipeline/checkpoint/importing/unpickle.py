"""Opens files of torch.save without executing code: plain values, tensors, and stand-ins for a few classes by name."""

from __future__ import annotations

import pickle
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

import torch

from foundation.errors import CheckpointError
from pipeline.checkpoint.format.pickled_metadata import Fields, Opaque, enum_member


class Fragment(Fields):
    """Stand-in for DeepSpeed's `fragment_address`: a range of a flat partition.

    Attributes:
        start: first element.
        numel: number of elements.
    """

    start: int
    numel: int


class StaticScale(Fields):
    """Stand-in for DeepSpeed's `LossScaler`."""


class DynamicScale(Fields):
    """Stand-in for DeepSpeed's `DynamicLossScaler`.

    Attributes:
        cur_scale: the scale.
        cur_iter: steps so far.
        last_overflow_iter: the last step that overflowed; -1 for none.
        cur_hysteresis: overflows left before the scale is lowered.
    """

    cur_scale: float
    cur_iter: int
    last_overflow_iter: int
    cur_hysteresis: int


class ZeroStage(IntEnum):
    """Stand-in for DeepSpeed's `ZeroStageEnum`."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


_KNOWN: dict[str, Any] = {
    "deepspeed.utils.tensor_fragment.fragment_address": Fragment,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": StaticScale,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicScale,
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStage,
    "builtins.getattr": enum_member,
}
"""Names in files of DeepSpeed -> objects created in their place."""
_ERRORS = (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, OSError)


def open_saved(path: Path, *, file: BinaryIO | None = None, opaque: bool = False) -> Any:
    """Opens a file of torch.save. Tensors are memory-mapped: their bytes are read when they are used.

    Args:
        path: path of the file, or of the file that contains it.
        file: an opened part of `path`, which is read at once; None for the whole file.
        opaque: whether unknown classes and functions become `Opaque`; otherwise they are refused.

    Raises:
        CheckpointError: the file is missing or damaged, or names an unknown class or function.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing\n  try: copy the whole folder again")
    source: Any = file or str(path)
    try:
        unknown = set(torch.serialization.get_unsafe_globals_in_checkpoint(source)) - _KNOWN.keys()
    except _ERRORS as error:
        raise _damaged(path, error) from None
    if unknown and not opaque:
        raise CheckpointError(
            f"{path} names {', '.join(sorted(unknown)[:4])}, which opening it would execute: refused\n"
            f"  try: save it again without objects other than tensors, numbers, texts, lists and dicts"
        )
    others = dict.fromkeys((*unknown, "builtins.getattr"), Opaque) if opaque else {}
    stand_ins: list[Any] = [(stand_in, name) for name, stand_in in (_KNOWN | others).items()]
    try:
        if file is not None:
            file.seek(0)
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(source, map_location="cpu", mmap=file is None, weights_only=True)
    except _ERRORS as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    lines = str(error).strip().splitlines() or [repr(error)]
    return CheckpointError(
        f"{path} is damaged, or no file of torch.save: {lines[0]}\n"
        f"  try: copy it again, or the checkpoint of another step"
    )
