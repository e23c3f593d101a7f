"""Reads Megatron-core's distributed checkpoints (`--ckpt-format torch_dist`), with Hugging Face names.

    latest_checkpointed_iteration.txt                text: the newest iteration
    iter_0000100/metadata.json                       {"sharded_backend": "torch_dist", ...}
    iter_0000100/.metadata, __R_N.distcp             a distributed checkpoint of torch
    iter_0000100/common.pt                           arguments, iteration, parameter groups; newer: in .distcp

    embedding.word_embeddings.weight                                   rows may be padding
    decoder.layers.self_attention.linear_qkv.weight  [L, rows, D]      all layers in one tensor; per key head its query
                                                                       heads, the key, the value
    decoder.layers.3.self_attention.linear_qkv.weight                  or a tensor per layer, where they differ
    decoder.layers.mlp.linear_fc1.weight             [L, 2 F, D]       gate, then up
    decoder.layers.mlp.experts.experts.linear_fc1.weight  [L, E, 2 F, D]
    optimizer.state.exp_avg.NAME                                       shaped as the weight; fp32_param, param: master
                                                                       weights
    optimizer.state.exp_avg.NAME  [pieces of each dim, elements of one piece]  with `fully_sharded_model_space`

Seen with megatron-core 0.13.1, 0.16.1 and its source of 2026-08-22 (0.20).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundation.errors import CheckpointError
from foundation.foreign_folders import file_beside
from foundation.foreign_json import read_json
from pipeline.checkpoint.format.megatron_names import BACKEND, COMMON, FAMILIES, LATEST, MegatronNames, Split
from pipeline.checkpoint.format.metadata import TORCH_METADATA
from pipeline.checkpoint.importing.dcp import DcpFolder
from pipeline.checkpoint.importing.megatron_arguments import check_arguments, fields_of
from pipeline.checkpoint.importing.source import (
    STATES,
    SourceCheckpoint,
    TargetModel,
    hugging_face_name,
    one_step_counter,
)
from pipeline.checkpoint.importing.unpickle import open_saved
from pipeline.checkpoint.write.streamed import LazyTensor

_COMMON_KEY = "common_state/shard_0_1"
_MASTERS = ("fp32_param", "param")
_STATE = re.compile(rf"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>{'|'.join((*STATES, *_MASTERS))})\.(?P<name>.+)")
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_LAYER = re.compile(r"decoder\.layers\.(?:(?P<number>\d+)\.)?(?P<inner>.+)")
_LEFT_OUT = {
    "opt_param_scheduler": "opt_param_scheduler: the config's schedule goes on at the step",
    "rerun_state_machine": "rerun_state_machine",
}


def read_megatron(folder: Path, wanted: TargetModel) -> SourceCheckpoint:
    """Opens a distributed checkpoint of Megatron-core.

    Args:
        folder: `iter_N`, or the folder with `latest_checkpointed_iteration.txt`.
        wanted: the model of the config: its family and numbers of heads.

    Raises:
        CheckpointError: the format or the model family is not known, or files are missing or damaged.
    """
    folder = _newest(folder)
    opened = DcpFolder.open(folder)
    family = _family_of(folder, wanted.hf_config)
    common = _common(folder, opened)
    _refuse_buckets(folder, opened)
    arguments = common.get("args")
    weights: dict[str, LazyTensor] = {}
    masters: dict[str, LazyTensor] = {}
    states: dict[str, dict[str, LazyTensor]] = {}
    left_out = [text for key, text in _LEFT_OUT.items() if key in common]
    left_out += [] if arguments is None else check_arguments(folder, arguments, wanted.hf_config)
    for key in opened.tensors:
        match = _STATE.fullmatch(key)
        kind, name = (match["kind"], match["name"]) if match else ("", key)
        into = masters if kind in _MASTERS else states.setdefault(kind, {}) if kind else weights
        for own, tensor in _renamed(opened, key, hugging_face_name(name), family):
            rows = wanted.parameters.get(own, (0,))[0]
            if rows and name.endswith(("word_embeddings.weight", "output_layer.weight")) and tensor.shape[0] > rows:
                into[own] = LazyTensor((rows, *tensor.shape[1:]), tensor.dtype, partial(_first, tensor, rows))
                left_out += [_padding(own, tensor.shape[0] - rows)] if into is weights else []
            else:
                into[own] = tensor
    if not states:
        raise CheckpointError(
            f"{folder} has no optimizer states (--no-save-optim)\n"
            "  try: convert it to a Hugging Face folder with Megatron Bridge, and take the weights, as model.path"
        )
    groups = list(_found(common.get("optimizer"), "param_groups"))
    counters = [*_found(common.get("optimizer"), "common_step"), *(group.get("step") for group in groups)]
    return SourceCheckpoint(
        path=folder,
        kind="Megatron-core (torch_dist)",
        step=int(common["iteration"]),
        weights=weights | masters,
        states=states,
        optimizer_step=one_step_counter(counters, folder),
        groups=[group for group in groups if "lr" in group],
        samples=getattr(arguments, "consumed_train_samples", None),
        hf_config=fields_of(arguments, wanted.hf_config) if arguments is not None else None,
        loss_scale=_loss_scale(common),
        left_out=left_out,
    )


def _newest(folder: Path) -> Path:
    """Finds the folder of an iteration, with `.metadata`."""
    if (folder / LATEST).is_file():
        latest = (folder / LATEST).read_text(errors="replace").strip()
        name = f"iter_{int(latest):07d}" if latest.isdecimal() else latest
        folder = file_beside(folder / LATEST, name, CheckpointError)
    backend = {}
    if (folder / BACKEND).is_file():
        backend = read_json(folder / BACKEND, error=CheckpointError)
    if backend.get("sharded_backend") != "torch_dist" or not (folder / TORCH_METADATA).is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint of Megatron's format torch_dist\n"
            "  try: load it in Megatron-LM with --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
            " --dist-ckpt-optim-fully-reshardable, and import FOLDER"
        )
    return folder


def _family_of(folder: Path, config: Mapping[str, Any]) -> MegatronNames:
    found = MegatronNames.of(config)
    if found is None:
        raise CheckpointError(
            f"{folder} is Megatron's, and the config's model is a {config.get('model_type')}\n"
            f"  try: model_type {', '.join(FAMILIES)}; others are not read: convert it to a Hugging Face folder with"
            " Megatron Bridge, and take the weights, as model.path"
        )
    return found


def _common(folder: Path, opened: DcpFolder) -> Mapping[str, Any]:
    """Reads arguments, iteration and parameter groups; objects among them become attributes without a class."""
    if _COMMON_KEY in opened.places:
        place = folder / opened.places[_COMMON_KEY].relative_path
        [found] = open_saved(place, file=opened.bytes_of(_COMMON_KEY), opaque=True)
    else:
        found = open_saved(folder / COMMON, opaque=True)
    if not isinstance(found, Mapping) or "iteration" not in found:
        raise CheckpointError(f"{folder} records no iteration\n  try: a checkpoint that Megatron-LM has saved")
    return found


def _refuse_buckets(folder: Path, opened: DcpFolder) -> None:
    if any(map(_BUCKETS.match, (*opened.tensors, *opened.places))):
        raise CheckpointError(
            f"{folder} has the buckets of Megatron's distributed optimizer (dp_reshardable), in which no parameter has"
            " a name\n  try: load it in Megatron-LM with --dist-ckpt-optim-fully-reshardable, and save it"
        )


def _renamed(opened: DcpFolder, key: str, name: str, family: MegatronNames) -> Iterator[tuple[str, LazyTensor]]:
    """Yields (Hugging Face name, tensor) for all parts of a stored tensor; an unknown name stays."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        yield family.whole.get(name, name), _unflattened(opened.tensor(key), opened, key)
        return
    fusion = family.inner.get(layer["inner"])
    names = [f"?.{layer['inner']}"] if fusion is None else fusion.names
    split: Split = (lambda tensor: [tensor]) if fusion is None else fusion.split
    if layer["number"] is not None:
        pieces = {int(layer["number"]): _unflattened(opened.tensor(key), opened, key)}
    else:
        count = opened.tensors[key].shape[0]
        pieces = {n: _unflattened(opened.row(key, n), opened, key, stacked=True) for n in range(count)}
    for number, piece in pieces.items():
        shapes = [tuple(each.shape) for each in split(torch.empty(piece.shape, device="meta"))]
        for place, (own, shape) in enumerate(zip(names, shapes, strict=True)):
            yield f"{family.layers}{number}.{own}", LazyTensor(shape, piece.dtype, partial(_part, piece, split, place))


def _part(tensor: LazyTensor, split: Split, place: int) -> Tensor:
    return split(tensor.read())[place].contiguous()


def _first(tensor: LazyTensor, rows: int) -> Tensor:
    return tensor.read()[:rows]


def _unflattened(tensor: LazyTensor, opened: DcpFolder, key: str, *, stacked: bool = False) -> LazyTensor:
    """Restores the shape of a tensor stored as [pieces along each dim, elements of one piece]; others are unchanged."""
    shapes = getattr(opened.metadata, "mcore_data", None) or {}
    whole = (shapes.get(key) or {}).get("nd_reformulated_orig_global_shape")
    if whole is None:
        return tensor
    shape = tuple(whole)[1:] if stacked else tuple(whole)
    return LazyTensor(shape, tensor.dtype, lambda: _joined(tensor.read(), shape))


def _joined(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    pieces = flat.shape[:-1]
    sizes = [size // count for size, count in zip(shape, pieces, strict=True)]
    order = [dim for pair in zip(range(len(shape)), range(len(shape), 2 * len(shape)), strict=True) for dim in pair]
    return flat.view(*pieces, *sizes).permute(order).reshape(shape)


def _padding(name: str, rows: int) -> str:
    return f"{rows:,} rows of {name} beyond model.config's vocab_size (Megatron's loss counts their logits, too)"


def _found(values: Any, key: str) -> Iterator[Any]:
    """Yields the values under a key in nested dicts and lists; if a value is a list, its items."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            if name == key:
                yield from value if isinstance(value, list) else [value]
            else:
                yield from _found(value, key)
    elif isinstance(values, list):
        for value in values:
            yield from _found(value, key)


def _loss_scale(common: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """Returns the state of Megatron's dynamic loss scaler, as in `SourceCheckpoint.loss_scale`."""
    for scaler in _found(common.get("optimizer"), "grad_scaler"):
        if "growth_tracker" in scaler:
            return float(scaler["scale"]), float(scaler["growth_tracker"]), float(scaler["hysteresis_tracker"])
    return None
