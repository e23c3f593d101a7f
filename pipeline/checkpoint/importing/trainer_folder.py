"""Checkpoints of the Hugging Face Trainer: `checkpoint-N` of one process and DDP, of DeepSpeed and of FSDP.

    trainer_state.json                               the step
    config.json                                      of the model
    model.safetensors, optimizer.pt, scaler.pt       of one process and DDP
    pytorch_model_fsdp_0/, optimizer_0/              of FSDP: distributed checkpoints of torch
    latest, global_stepN/                            of DeepSpeed

`scheduler.pt`, `rng_state*.pth` and `training_args.bin` are not read. Seen with transformers 5.23, accelerate 1.15.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from headrace.base.errors import CheckpointError
from pipeline.checkpoint.importing.dcp import read_folders
from pipeline.checkpoint.importing.numbered import states_of
from pipeline.checkpoint.importing.source import (
    SourceCheckpoint,
    TargetModel,
    hugging_face_name,
    one_step_counter,
    stored,
)
from pipeline.checkpoint.importing.unpickle import open_saved
from pipeline.checkpoint.importing.zero import LATEST, read_zero
from pipeline.checkpoint.write.streamed import LazyTensor
from pipeline.models.folder.model_folder import ModelFolder

STATE = "trainer_state.json"
_FSDP = ("pytorch_model_fsdp_0", "optimizer_0")
_LEFT_OUT = {
    "scheduler.pt": "scheduler.pt: the config's schedule goes on at the step",
    "rng_state*.pth": "rng_state*.pth: nothing in a run is drawn but first weights and the order of samples",
    "training_args.bin": "training_args.bin: batch, schedule and precision are the config's",
}


def read_trainer(folder: Path, wanted: TargetModel) -> SourceCheckpoint:
    """Opens a checkpoint of the Trainer.

    Args:
        folder: `checkpoint-N`.
        wanted: gives the order of the parameters.

    Raises:
        CheckpointError: files are missing or damaged, or it was saved without its optimizer state.
    """
    step = _step(folder)
    if (folder / LATEST).is_file():
        source = read_zero(folder, wanted)
        source = replace(source, kind=f"the Hugging Face Trainer, {source.kind}")
    elif any((folder / name).is_dir() for name in _FSDP):
        source = replace(
            read_folders([folder / name for name in _FSDP], step=step), kind="the Hugging Face Trainer, FSDP"
        )
    else:
        source = _replicated(folder, wanted, step)
    config = folder / "config.json"
    left_out = [text for pattern, text in _LEFT_OUT.items() if any(folder.glob(pattern))]
    return replace(
        source,
        path=folder,
        step=step,
        hf_config=json.loads(config.read_text()) if config.is_file() else None,
        loss_scale=source.loss_scale or _loss_scale(folder),
        left_out=[*source.left_out, *left_out],
    )


def _step(folder: Path) -> int:
    try:
        return int(json.loads((folder / STATE).read_text())["global_step"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / STATE} is damaged: {error!r}\n  try: another checkpoint") from None


def _replicated(folder: Path, wanted: TargetModel, step: int) -> SourceCheckpoint:
    path = folder / "optimizer.pt"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no optimizer state (optimizer.pt, optimizer_0 or global_step*): it was saved by"
            " save_only_model, or copied in part\n"
            "  try: give it as model.path, for its weights alone"
        )
    optimizer = open_saved(path)
    states, counters = states_of(optimizer, wanted.parameters, path)
    return SourceCheckpoint(
        path=folder,
        kind="the Hugging Face Trainer",
        step=step,
        weights=_weights(folder),
        states=states,
        optimizer_step=one_step_counter(counters, path),
        groups=optimizer["param_groups"],
    )


def _weights(folder: Path) -> dict[str, LazyTensor]:
    """Of safetensors files, or of what older versions saved by torch.save."""
    saved = sorted(folder.glob("pytorch_model*.bin"))
    if saved and not any(folder.glob("*.safetensors")):
        opened: Iterable[Mapping[str, Any]] = map(open_saved, saved)
        return {hugging_face_name(name): stored(tensor) for each in opened for name, tensor in each.items()}
    found: dict[str, LazyTensor] = {}
    for path in ModelFolder.open(folder).files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                part = file.get_slice(name)
                dtype = file.get_tensor(name).dtype if not part.get_shape() else part[:0].dtype
                found[hugging_face_name(name)] = LazyTensor(tuple(part.get_shape()), dtype, _reads(path, name))
    return found


def _reads(path: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return read


def _loss_scale(folder: Path) -> tuple[float, float, float] | None:
    """Of torch's GradScaler, which lowers the scale at the first overflow."""
    if not (folder / "scaler.pt").is_file():
        return None
    scaler = open_saved(folder / "scaler.pt")
    return (float(scaler["scale"]), float(scaler["_growth_tracker"]), 1.0) if "scale" in scaler else None
