"""Reads DeepSpeed's universal checkpoints, which its `ds_to_universal` makes from any ZeRO stage.

    latest_universal                                 text: the newest tag
    global_step9_universal/mp_rank_00_model_states.pt              the engine's state (of stage 3: zero_pp_rank_0_...)
    global_step9_universal/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt   {"param": tensor}; of stage 3 a flat tensor
    global_step9_universal/zero/NAME/step.pt                       of stages 1 and 2
    global_step9_universal/zero/optimizer_state.pt                 loss scale, parameter groups

Seen with deepspeed 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from foundation.errors import CheckpointError
from pipeline.checkpoint.importing.source import (
    SourceCheckpoint,
    TargetModel,
    hugging_face_name,
    one_step_counter,
)
from pipeline.checkpoint.importing.unpickle import open_saved
from pipeline.checkpoint.importing.zero import (
    left_out_of,
    loss_scale_of,
    members_of,
    newest_tag,
    others_of,
    read_head,
    with_adam_mode,
)
from pipeline.checkpoint.write.streamed import LazyTensor

ZERO, WEIGHT, LATEST_UNIVERSAL, OPTIMIZER = "zero", "fp32", "latest_universal", "optimizer_state.pt"


def read_universal(folder: Path, _wanted: TargetModel) -> SourceCheckpoint:
    """Opens a universal checkpoint.

    Args:
        folder: the folder with `latest_universal`, or the folder of one step in it.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    tag = newest_tag(folder, latest=LATEST_UNIVERSAL)
    head = read_head(tag)
    optimizer = open_saved(tag / ZERO / OPTIMIZER)
    base = optimizer.get("optimizer_state_dict") or {}
    shapes = {name: tuple(shape) for group in head.get("param_shapes") or () for name, shape in group.items()}
    names = sorted(path.name for path in (tag / ZERO).iterdir() if path.is_dir())
    if missing := sorted(shapes.keys() - set(names)):
        listed = ", ".join(missing[:4])
        raise CheckpointError(f"{tag / ZERO} lacks {listed}\n  try: convert the checkpoint again")
    kinds = {path.stem for path in (tag / ZERO).glob("*/*.pt")} - {"step"}
    tensors = {
        kind: {hugging_face_name(name): _tensor(tag / ZERO / name / f"{kind}.pt", shapes.get(name)) for name in own}
        for kind in sorted({WEIGHT, *kinds})
        if (own := [name for name in names if kind == WEIGHT or (tag / ZERO / name / f"{kind}.pt").is_file()])
    }
    weights = tensors.pop(WEIGHT, {})
    groups = list(optimizer.get("param_groups") or base.get("param_groups") or ())
    return SourceCheckpoint(
        path=tag,
        kind="DeepSpeed universal checkpoint",
        step=int(head["global_steps"]),
        weights={**others_of(head, weights), **weights},
        states=tensors,
        optimizer_step=one_step_counter(_counters(tag, names, base), tag),
        groups=with_adam_mode(groups, head),
        members=members_of(groups, head) if head.get("param_shapes") else (),
        samples=head.get("global_samples"),
        loss_scale=loss_scale_of(optimizer.get("loss_scaler")),
        left_out=left_out_of(head),
    )


def _tensor(path: Path, shape: tuple[int, ...] | None) -> LazyTensor:
    found = _param(path)
    shape = tuple(found.shape) if found.ndim > 1 or shape is None else shape
    if found.numel() != math.prod(shape):
        raise CheckpointError(
            f"{path} has {found.numel():,} elements, and the config's model needs {shape}\n  try: convert it again"
        )
    # each file is opened again when it is read: one mapping per file of a large model would be too many
    return LazyTensor(shape, found.dtype, lambda: _param(path).reshape(shape))


def _param(path: Path) -> Tensor:
    found = open_saved(path)
    tensor: Tensor = found["param"] if isinstance(found, Mapping) else found
    return tensor


def _counters(tag: Path, names: list[str], base: Mapping[str, Any]) -> Iterator[Any]:
    yield from (state.get("step") for state in (base.get("state") or {}).values())
    for path in (tag / ZERO / name / "step.pt" for name in names):
        if path.is_file():
            yield open_saved(path)
