"""Stores the sums of `importance` beside the output, so that a second start does not gather them again."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foundation.directory import fingerprint_of, sync
from pipeline.compress.pruning.axes import LAYERS
from pipeline.compress.pruning.importance import Sums
from pipeline.compress.pruning.rules import PruningPlan

_FILE = "importance.safetensors"
_VERSION = 2
"""Version of the sums; raise it when their contents change."""


def work_directory(plan: PruningPlan) -> Path:
    """Directory of the sums, beside the output; removed once the output is committed."""
    return plan.output.parent / f".{plan.output.name}.work"


def needs_loss(plan: PruningPlan) -> bool:
    """Whether layers are cut by the loss without each of them."""
    fewer = plan.shape is not None and plan.shape[LAYERS] < plan.anatomy.sizes[LAYERS]
    searched = plan.choices is not None and LAYERS in plan.choices.allowed
    return plan.config.importance.depth == "loss" and (fewer or searched)


def fingerprint(plan: PruningPlan) -> str:
    """Fingerprint of all inputs of the sums: model, tokens, windows; not the number of processes."""
    data = plan.config.data
    return fingerprint_of(
        {
            "version": _VERSION,
            "model": plan.source.fingerprint(),
            "data": plan.calibration.manifest.fingerprint,
            "calibration": plan.config.calibration.model_dump(),
            "windows": [data.sequence_length, data.mask_documents],
            "loss": needs_loss(plan),
        }
    )


def load_sums(plan: PruningPlan, mark: str) -> Sums | None:
    """Loads the sums of an earlier start with the same fingerprint; None if there are none."""
    path = work_directory(plan) / _FILE
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("fingerprint") != mark:
                return None
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (FileNotFoundError, SafetensorError):
        return None


def save_sums(plan: PruningPlan, sums: Sums, mark: str) -> None:
    """Writes the sums atomically."""
    folder = work_directory(plan)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{_FILE}.partial"
    save_file({key: value.contiguous() for key, value in sums.items()}, partial, metadata={"fingerprint": mark})
    sync(partial)
    partial.replace(folder / _FILE)


def remove_sums(plan: PruningPlan) -> None:
    """Removes the work directory."""
    shutil.rmtree(work_directory(plan), ignore_errors=True)
