"""Writes a checkpoint as a universal checkpoint, which DeepSpeed's engine loads at ZeRO 1, 2 and 3.

The engine's `load_checkpoint(OUT)` needs `"checkpoint": {"load_universal": true}`.
`pipeline/checkpoint/importing/universal.py` describes the format. The parameter groups contain no hyperparameters, so
that the engine keeps its own: at stage 3 DeepSpeed 0.19.8 would give every group the hyperparameters of the first.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.export.trained_state import TrainedState
from pipeline.checkpoint.write.streamed import Progress

_GROUPS = 64
"""Number of parameter groups in the file: DeepSpeed drops an engine's groups that have no entry there."""


def write_universal(state: TrainedState, directory: Path, progress: Progress) -> None:
    """Writes a universal checkpoint of DeepSpeed: `latest_universal`, and the folder of the step.

    Args:
        state: the state to write.
        directory: existing empty directory.
        progress: called as tensors are written.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError, RuntimeError: a file cannot be written.
    """
    tag = directory / f"global_step{state.step}_universal"
    kinds = ("fp32", "exp_avg", "exp_avg_sq")
    total = sum(len(kinds) * state.weight(name).nbytes for name in state.names)
    step, done = state.optimizer_step(), 0
    for name in state.names:
        folder = tag / "zero" / name
        folder.mkdir(parents=True)
        for kind in kinds:
            tensor = state.weight(name) if kind == "fp32" else state.moment(kind, name)
            torch.save({"param": tensor.read(), "cat_dim": 0}, folder / f"{kind}.pt")
            done += tensor.nbytes
            progress(done, total)
        torch.save(step, folder / "step.pt")
    torch.save(_optimizer(step), tag / "zero" / "optimizer_state.pt")
    head = _head(state)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(head, tag / name)
    (directory / "latest_universal").write_text(tag.name)


def _optimizer(step: torch.Tensor) -> dict[str, Any]:
    groups: list[dict[str, Any]] = [{} for _ in range(_GROUPS)]
    return {
        "ds_version": version("deepspeed"),
        "param_groups": groups,  # of stages 1 and 2
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups[:1]},  # of stage 3
    }


def _head(state: TrainedState) -> dict[str, Any]:
    """Returns the state of DeepSpeed's engine (`mp_rank_00_model_states.pt`)."""
    return {
        "module": {name: buffer.read() for name, buffer in state.buffers().items()},
        "buffer_names": list(state.buffers()),
        "param_shapes": [{name: torch.Size(state.weight(name).shape) for name in state.names}],
        "optimizer": None,
        # DeepSpeed's schedulers count from 0, and are called after every step
        "lr_scheduler": {"last_batch_iteration": state.step - 1},
        "skipped_steps": 0,
        "global_steps": state.step,
        "global_samples": state.samples,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": version("deepspeed"),
    }
