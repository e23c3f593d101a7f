"""Reads checkpoints of the Hugging Face Trainer, `checkpoint-N`, and of accelerate's `save_state`.

    trainer_state.json                               Trainer: the step
    config.json                                      Trainer: the model's config
    model.safetensors, optimizer.pt, scaler.pt       one process, or DDP; accelerate: optimizer.bin
    pytorch_model_fsdp_0/, optimizer_0/              FSDP: distributed checkpoints of torch
    pytorch_model_fsdp.bin, optimizer.bin            FSDP with FULL_STATE_DICT: states by name
    latest, global_stepN/                            DeepSpeed; accelerate: in pytorch_model/

accelerate records no step, so the optimizer's is used. Schedulers, random states and `training_args.bin` are not read.
Seen with transformers 5.23, accelerate 1.15.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from foundation.errors import CheckpointError
from foundation.foreign_json import read_json
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
from pipeline.models.folder.model_folder import read_config
from pipeline.models.folder.weight_files import stored_tensors

STATE = "trainer_state.json"
_FSDP = ("pytorch_model_fsdp_0", "optimizer_0")
_SAVED = ("optimizer.pt", "optimizer.bin")
_SECOND = re.compile(r"_\d+\.bin$")
"""Name ending of accelerate's files of a second model, whose weights may have the same names as the first model's."""
_LEFT_OUT = {
    "scheduler.[pb]*": "scheduler.pt, .bin: the config's schedule goes on at the step",
    "rng_state*.pth": "rng_state*.pth: a run draws random numbers for first weights and sample order only",
    "random_states_*.pkl": "random_states_*.pkl: a run draws random numbers for first weights and sample order only",
    "*_1.[bs]*": "the files of a second model or optimizer",
    "training_args.bin": "training_args.bin: batch, schedule and precision are the config's",
}


def read_trainer(folder: Path, wanted: TargetModel) -> SourceCheckpoint:
    """Opens a checkpoint of the Trainer, or of accelerate.

    Args:
        folder: `checkpoint-N`, or the folder that `save_state` wrote to.
        wanted: the model of the config, for the order of the parameters.

    Raises:
        CheckpointError: files are missing or damaged, or there is no optimizer state.
    """
    step = _step(folder) if (folder / STATE).is_file() else None
    whose = "accelerate's save_state" if step is None else "the Hugging Face Trainer"
    if (folder / LATEST).is_file():
        source = read_zero(folder, wanted)
        source = replace(source, kind=f"{whose}, {source.kind}")
    elif any((folder / name).is_dir() for name in _FSDP):
        source = replace(read_folders([folder / name for name in _FSDP], step=step), kind=f"{whose}, FSDP")
    else:
        source = replace(_replicated(folder, wanted, step), kind=whose)
    config = folder / "config.json"
    left_out = [text for pattern, text in _LEFT_OUT.items() if any(folder.glob(pattern))]
    return replace(
        source,
        path=folder,
        step=source.step if step is None else step,
        hf_config=read_config(folder) if config.is_file() else None,
        loss_scale=source.loss_scale or _loss_scale(folder),
        left_out=[*source.left_out, *left_out],
    )


def _step(folder: Path) -> int:
    try:
        return int(read_json(folder / STATE, remedy="another checkpoint", error=CheckpointError)["global_step"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / STATE} is damaged: {error!r}\n  try: another checkpoint") from None


def _replicated(folder: Path, wanted: TargetModel, step: int | None) -> SourceCheckpoint:
    path = next((folder / name for name in _SAVED if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(
            f"{folder} has no optimizer state ({', '.join(_SAVED)}, optimizer_0 or global_step*): it was saved by"
            " save_only_model, or copied in part\n"
            "  try: give it as model.path, for its weights alone"
        )
    optimizer = open_saved(path)
    if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= optimizer.keys():
        why = f"{path} holds no state that a torch optimizer would load"
        raise CheckpointError(f"{why}\n  try: give {folder} as model.path, for its weights alone")
    found = states_of(optimizer, wanted.parameters, path)
    counter = one_step_counter(found.counters, path)
    return SourceCheckpoint(
        path=folder,
        kind="",
        step=int(counter or 0) if step is None else step,
        weights=_weights(folder),
        states=found.states,
        optimizer_step=counter,
        groups=optimizer["param_groups"],
        members=found.members,
        answers={} if step is None and counter is None else None,
    )


def _weights(folder: Path) -> dict[str, LazyTensor]:
    """Reads weights from safetensors files, or from files that older versions and FSDP wrote with torch.save."""
    saved = [path for path in sorted(folder.glob("pytorch_model*.bin")) if not _SECOND.search(path.name)]
    if saved and not any(folder.glob("*.safetensors")):
        opened: Iterable[Mapping[str, Any]] = map(open_saved, saved)
        return {hugging_face_name(name): stored(tensor) for each in opened for name, tensor in each.items()}
    found: dict[str, LazyTensor] = {}
    for name, info in stored_tensors(folder).items():
        with safe_open(info.file, framework="pt") as file:
            dtype = file.get_tensor(name).dtype if not info.shape else file.get_slice(name)[:0].dtype
        found[hugging_face_name(name)] = LazyTensor(info.shape, dtype, _reads(info.file, name))
    return found


def _reads(path: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return read


def _loss_scale(folder: Path) -> tuple[float, float, float] | None:
    """Reads the state of torch's GradScaler, which lowers the scale at the first overflow."""
    if not (folder / "scaler.pt").is_file():
        return None
    scaler = open_saved(folder / "scaler.pt")
    return (float(scaler["scale"]), float(scaler["_growth_tracker"]), 1.0) if "scale" in scaler else None
