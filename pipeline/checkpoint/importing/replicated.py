"""Reads fp32 checkpoints of DeepSpeed without ZeRO: a state dict and torch's own optimizer state in one file."""

from __future__ import annotations

from pathlib import Path

from foundation.errors import CheckpointError
from pipeline.checkpoint.importing.numbered import states_of
from pipeline.checkpoint.importing.source import (
    SourceCheckpoint,
    TargetModel,
    hugging_face_name,
    one_step_counter,
    stored,
)
from pipeline.checkpoint.importing.zero import left_out_of, newest_tag, read_head


def read_replicated(folder: Path, wanted: TargetModel) -> SourceCheckpoint:
    """Opens a checkpoint of ZeRO stage 0.

    Args:
        folder: folder that the engine's `save_checkpoint` wrote to, or one of its steps.
        wanted: the model of the config, for the order of the parameters.

    Raises:
        CheckpointError: a file is missing or damaged, or the run used ZeRO, model parallelism or 16-bit weights.
    """
    tag = newest_tag(folder)
    if (ranks := sorted(path.name for path in tag.glob("*_model_states.pt"))) != ["mp_rank_00_model_states.pt"]:
        why = f"its optimizer states are missing (*_optim_states.pt), or it is parallel: {', '.join(ranks[:3])}"
        raise CheckpointError(f"{tag}: {why}\n  try: copy the files of all ranks")
    head = read_head(tag)
    optimizer = head.get("optimizer")
    if not isinstance(optimizer, dict) or not {"state", "param_groups"} <= optimizer.keys():
        why = "it has no optimizer state that torch.optim would load"
        if head.get("optimizer") is None and head.get("param_shapes"):
            why = "ZeRO saved it, and its optimizer states (*_optim_states.pt) are missing"
        raise CheckpointError(f"{tag}: {why}\n  try: copy the files of all ranks, or save it with ZeRO stage 1")
    found = states_of(optimizer, wanted.parameters, tag)
    return SourceCheckpoint(
        path=tag,
        kind="DeepSpeed without ZeRO",
        step=int(head["global_steps"]),
        weights={hugging_face_name(name): stored(tensor) for name, tensor in head["module"].items()},
        states=found.states,
        optimizer_step=one_step_counter(found.counters, tag),
        groups=optimizer["param_groups"],
        members=found.members,
        samples=head.get("global_samples"),
        left_out=left_out_of(head),
    )
