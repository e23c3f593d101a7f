"""Reads checkpoints that DeepSpeed's engine writes at ZeRO stages 1 to 3, on any number of ranks.

    latest                                           text: the newest tag
    global_step9/mp_rank_00_model_states.pt          steps, names and shapes of the parameters, buffers (stages 1, 2)
    global_step9/zero_pp_rank_R_mp_rank_00_model_states.pt                               the same of rank R (stage 3)
    global_step9/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   flat partitions of rank R: fp32 weights and states

At stages 1 and 2 a partition is a range of a group's concatenated parameters; `param_slice_mappings` gives the offset
of each parameter's part in it. At stage 3 every parameter is divided among all ranks, in equal parts with padding at
the end; a partition is the concatenation of the rank's parts of a sub-group. Seen with deepspeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundation.errors import CheckpointError
from foundation.foreign_folders import file_beside
from pipeline.checkpoint.importing.source import (
    SourceCheckpoint,
    TargetModel,
    from_pieces,
    hugging_face_name,
    is_state,
    one_step_counter,
    stored,
)
from pipeline.checkpoint.importing.unpickle import DynamicScale, open_saved
from pipeline.checkpoint.write.streamed import LazyTensor

LATEST = "latest"
_RANK_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_WEIGHT = "weight"
_UNIVERSAL = (
    "python -m deepspeed.checkpoint.ds_to_universal --input_folder FOLDER --output_folder FOLDER_universal, then"
    " headrace import FOLDER_universal"
)
Pieces = dict[str, dict[str, list[Tensor]]]
"""weight, exp_avg, ... -> parameter name -> its flat pieces, in order."""


@dataclass(frozen=True)
class ZeroFiles:
    """Contents of the files of all ranks.

    Attributes:
        pieces: flat pieces of every tensor.
        counters: step counters of the optimizer.
        groups: parameter groups of the optimizer.
    """

    pieces: Pieces
    counters: list[Any]
    groups: list[Mapping[str, Any]]


def newest_tag(folder: Path, *, latest: str = LATEST) -> Path:
    """Returns the folder of the step that `latest` names, or of the only step; `folder` itself if it is a step's.

    Raises:
        CheckpointError: there is no step, or there are several and no `latest`.
    """
    if (folder / latest).is_file():
        tag = file_beside(folder / latest, (folder / latest).read_text(errors="replace").strip(), CheckpointError)
        if not tag.is_dir():
            raise CheckpointError(f"{folder / latest} names {tag.name}, which is missing\n  try: copy it here, too")
        return tag
    if any(folder.glob("*_states.pt")):
        return folder
    tags = sorted(each for each in folder.iterdir() if each.is_dir() and any(each.glob("*_states.pt")))
    if len(tags) != 1:
        names = ", ".join(tag.name for tag in tags) or "none"
        raise CheckpointError(f"{folder} has no file {latest}; its steps: {names}\n  try: the folder of one step")
    return tags[0]


def read_zero(folder: Path, _wanted: TargetModel) -> SourceCheckpoint:
    """Opens a checkpoint of ZeRO.

    Args:
        folder: folder that the engine's `save_checkpoint` wrote to, or one of its steps.

    Raises:
        CheckpointError: files of ranks are missing or damaged, or the run used tensor or pipeline parallelism.
    """
    tag = newest_tag(folder)
    ranks = _files_of_ranks(tag)
    head = read_head(tag)
    first = open_saved(tag / ranks[0])["optimizer_state_dict"]
    # groups may have different counts, since experts are divided differently: the largest is all ranks
    counts = first["partition_count"]
    world = max(counts) if isinstance(counts, list) else int(counts)
    _check_ranks(tag, ranks, world)
    opened = [open_saved(tag / ranks[rank])["optimizer_state_dict"] for rank in range(world)]
    stage = int(first.get("zero_stage", 1))  # BF16_Optimizer records none
    _refuse_others(tag, head, first, stage)
    found = _stage3(head["param_shapes"], opened) if stage == 3 else _stage12(opened)
    shapes = {hugging_face_name(name): tuple(s) for group in head["param_shapes"] for name, s in group.items()}
    tensors = {
        kind: {name: from_pieces(name, shapes[name], pieces, tag) for name, pieces in named.items()}
        for kind, named in found.pieces.items()
    }
    weights = tensors.pop(_WEIGHT, {})
    if missing := sorted(shapes.keys() - weights.keys()):
        raise CheckpointError(f"{tag}: no rank holds {', '.join(missing[:4])}\n  try: the checkpoint of another step")
    return SourceCheckpoint(
        path=tag,
        kind=f"DeepSpeed ZeRO-{stage} of {world} rank{'s' if world > 1 else ''}",
        step=int(head["global_steps"]),
        weights={**others_of(head, shapes), **weights},
        states=tensors,
        optimizer_step=one_step_counter(found.counters, tag),
        groups=with_adam_mode(found.groups, head),
        members=members_of(found.groups, head),
        samples=head.get("global_samples"),
        loss_scale=loss_scale_of(first.get("loss_scaler")),
        left_out=left_out_of(head),
    )


def left_out_of(head: Mapping[str, Any]) -> list[str]:
    """Describes, for people, the contents of the engine's state file that are not imported."""
    names = {"lr_scheduler": "lr_scheduler: the config's schedule goes on at the step", "data_sampler": "data_sampler"}
    return [text for key, text in names.items() if head.get(key) is not None]


def _files_of_ranks(tag: Path) -> dict[int, str]:
    """Maps each rank to the name of its file."""
    found: dict[int, str] = {}
    parallel: list[str] = []
    for path in sorted(tag.glob("*_optim_states.pt")):
        match = _RANK_FILE.fullmatch(path.name)
        if match is None or int(match[2]) > 0:
            parallel.append(path.name)
        else:
            found[int(match[1])] = path.name
    layers = sorted(path.name for path in tag.glob("layer_*-model_*"))
    if parallel or layers:
        raise CheckpointError(
            f"{tag} is divided by tensor, pipeline or expert parallelism: {', '.join([*parallel, *layers][:3])}\n"
            f"  try: {_UNIVERSAL.replace('FOLDER', str(tag))}"
        )
    if not found:
        why = "no zero_pp_rank_*_optim_states.pt in it"
        raise CheckpointError(f"{tag} has no optimizer state: {why}\n  try: copy the files of all ranks")
    return found if 0 in found else {0: found[min(found)], **found}


def _check_ranks(tag: Path, ranks: Mapping[int, str], world: int) -> None:
    there = {path.name for path in tag.glob("*_optim_states.pt")}
    prefix = ranks[0].partition("zero_pp_rank_")[0]
    wanted = [f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world)]
    missing = [name for name in wanted if name not in there]
    if missing:
        listed = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise CheckpointError(
            f"{tag} was saved by {world} ranks, and {len(missing)} of their files are missing: {listed}\n"
            f"  try: copy them here, from the disks of all nodes"
        )
    if more := sorted(there - set(wanted)):
        raise CheckpointError(
            f"{tag} was saved by {world} ranks, and has files of more ranks: {', '.join(more[:4])}\n"
            f"  try: remove what an older checkpoint of more ranks has left there, or another step"
        )


def read_head(tag: Path) -> Mapping[str, Any]:
    """Reads the file of the engine's state; at stage 3, rank 0's file.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    name = next((name for name in names if (tag / name).is_file()), None)
    if name is None:
        raise CheckpointError(f"{tag} lacks {names[0]} (stage 3: {names[1]})\n  try: copy it here, too")
    head: Mapping[str, Any] = open_saved(tag / name)
    return head


def _refuse_others(tag: Path, head: Mapping[str, Any], state: Mapping[str, Any], stage: int) -> None:
    if frozen := head.get("frozen_param_shapes"):
        why = f"it has frozen parameters ({', '.join(list(frozen)[:3])}), and a run trains all"
        raise CheckpointError(f"{tag}: {why}\n  try: merge adapters, and take the weights alone, as model.path")
    if stage == 3:
        if not state.get("fp32_flat_groups"):
            why = "its optimizer state is on NVMe, not in the folder"
            raise CheckpointError(f"{tag}: {why}\n  try: save it with zero_optimization.offload_optimizer on cpu")
    elif "param_slice_mappings" not in state or not isinstance(state.get("base_optimizer_state"), Mapping):
        why = f"deepspeed {state.get('ds_version') or head.get('ds_version')} wrote no param_slice_mappings into it"
        if isinstance(state.get("base_optimizer_state"), list):
            why = "it was saved with elastic_checkpoint, which drops where parameters begin"
        raise CheckpointError(
            f"{tag}: {why}\n  try: load and save it with a newer deepspeed, without elastic_checkpoint"
        )


def _stage12(opened: list[Any]) -> ZeroFiles:
    pieces: Pieces = {}
    counters: list[Any] = []
    for state in opened:
        base = state["base_optimizer_state"]["state"]
        for index, (weight, mapping) in enumerate(
            zip(state["single_partition_of_fp32_groups"], state["param_slice_mappings"], strict=True)
        ):
            own = base.get(index, {})
            counters.append(own.get("step"))
            for kind, flat in _tensors(weight, own):
                for name, part in mapping.items():
                    piece = flat.reshape(-1).narrow(0, part.start, part.numel)
                    pieces.setdefault(kind, {}).setdefault(hugging_face_name(name), []).append(piece)
    return ZeroFiles(pieces, counters, list(opened[0]["base_optimizer_state"]["param_groups"]))


def _stage3(shapes: list[Mapping[str, Any]], opened: list[Any]) -> ZeroFiles:
    pieces: Pieces = {}
    counters: list[Any] = []
    for rank, state in enumerate(opened):
        base = state["optimizer_state_dict"]["state"]
        for index, (weight, group) in enumerate(zip(state["fp32_flat_groups"], shapes, strict=True)):
            own = base.get(index, {})
            counters.append(own.get("step"))
            for kind, flat in _tensors(weight, own):
                for name, start, length in _parts(group, rank=rank, world=len(opened)):
                    piece = flat.reshape(-1).narrow(0, start, length)
                    pieces.setdefault(kind, {}).setdefault(hugging_face_name(name), []).append(piece)
    return ZeroFiles(pieces, counters, list(opened[0]["optimizer_state_dict"]["param_groups"]))


def _parts(group: Mapping[str, Any], *, rank: int, world: int) -> Iterator[tuple[str, int, int]]:
    """Yields name, first index and length of the rank's part in its partition, for each parameter of a sub-group."""
    start = 0
    for name, shape in group.items():
        numel = torch.Size(shape).numel()
        part = -(-numel // world)
        yield name, start, max(0, min(part, numel - rank * part))
        start += part


def _tensors(weight: Tensor, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    yield _WEIGHT, weight
    yield from ((name, value) for name, value in state.items() if is_state(value))


def others_of(head: Mapping[str, Any], taken: Collection[str]) -> dict[str, LazyTensor]:
    """Tensors of the engine's model besides the trained parameters: buffers, a tied head.

    At stage 3 the engine's own parameters have no elements.
    """
    module = {hugging_face_name(name): tensor for name, tensor in (head.get("module") or {}).items()}
    return {n: stored(t) for n, t in module.items() if n not in taken and isinstance(t, Tensor) and t.numel()}


def members_of(groups: Sequence[Mapping[str, Any]], head: Mapping[str, Any]) -> list[list[str]]:
    """Returns the parameter names of each group; one item of `param_shapes` is one flat partition of the optimizer."""
    names = [[hugging_face_name(name) for name in shapes] for shapes in head["param_shapes"]]
    numbers = [number for group in groups for number in group.get("params", ())]
    if sorted(numbers) != list(range(len(names))):
        return names if len(names) == len(groups) else []
    return [[name for number in group["params"] for name in names[number]] for group in groups]


def with_adam_mode(groups: Sequence[Mapping[str, Any]], head: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Adds to the groups of DeepSpeed's Adam whether weight decay is decoupled; only DeepSpeed's config records it."""
    section = (head.get("ds_config") or {}).get("optimizer") or {}
    mode = (section.get("params") or {}).get("adam_w_mode")
    if str(section.get("type", "")).lower() != "adam" or mode is None:
        return list(groups)
    return [{**group, "decoupled_weight_decay": mode} for group in groups]


def loss_scale_of(scaler: Any) -> tuple[float, float, float] | None:
    """Returns a dynamic loss scaler's state as in `SourceCheckpoint.loss_scale`; None for a static scaler."""
    if not isinstance(scaler, DynamicScale):
        return None
    return scaler.cur_scale, scaler.cur_iter - 1 - scaler.last_overflow_iter, scaler.cur_hysteresis
