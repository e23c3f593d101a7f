"""Writes a checkpoint, optimizer included, as a distributed checkpoint of Megatron-core (`torch_dist`).

`pipeline/checkpoint/importing/megatron.py` describes the format: all layers of a kind of weight are one tensor, each
layer a chunk of it. The optimizer states have the format of `--dist-ckpt-optim-fully-reshardable`, so that Megatron can
load them at any size of tp, pp, ep and dp. Weights are the fp32 masters; each is stored once, under both of its names.
"""

from __future__ import annotations

import io
import json
import pickle
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from foundation.errors import CheckpointError
from pipeline.checkpoint.export.trained_state import TrainedState
from pipeline.checkpoint.format.megatron_names import BACKEND, COMMON, FAMILIES, LATEST, Fusion, MegatronNames
from pipeline.checkpoint.format.metadata import TORCH_METADATA
from pipeline.checkpoint.format.torch_reader import to_torch_metadata
from pipeline.checkpoint.write.streamed import LazyTensor, Progress, write_streamed

_EXTRA = "__1_0.distcp"
"""File of the extra states, where Transformer Engine's linear layers store fp8 scaling; empty here."""
_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "core_attention")
_KINDS = {"weight": ("", "optimizer.state.param."), "exp_avg": ("optimizer.state.exp_avg.",)} | {
    "exp_avg_sq": ("optimizer.state.exp_avg_sq.",)
}
"""Kind of tensor -> prefixes of its keys in Megatron."""


def write_megatron(state: TrainedState, directory: Path, progress: Progress) -> None:
    """Writes the folder: `latest_checkpointed_iteration.txt`, and `iter_N`.

    Args:
        state: the state to write.
        directory: existing empty directory.
        progress: called as tensors are written.

    Raises:
        CheckpointError: Megatron's names for the model or a weight are not known, or a tensor cannot be read.
        OSError, RuntimeError: a file cannot be written.
    """
    config = state.model.config.to_dict()  # type: ignore[operator,union-attr]
    family = MegatronNames.of(config)
    if family is None:
        raise CheckpointError(
            f"Megatron's names of a {config.get('model_type')} are not known\n"
            f"  try: --format dcp; or a model of {', '.join(FAMILIES)}"
        )
    names = _megatron_names(state, family)
    folder = directory / f"iter_{state.step:07d}"
    folder.mkdir()
    written, _sha256 = write_streamed(dict(_tensors(state, names)), folder, progress)
    metadata = _stacked(to_torch_metadata(written), names, family)
    _write_extra_states(metadata, config, folder / _EXTRA)
    metadata.storage_meta = StorageMeta()
    with (folder / TORCH_METADATA).open("wb") as file:
        pickle.dump(metadata, file)
    torch.save(_common(state, config), folder / COMMON)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / BACKEND).write_text(json.dumps(backend | {"common_backend": "torch", "common_backend_version": 1}))
    (directory / LATEST).write_text(str(state.step))


Piece = tuple[str, int | None]
"""Megatron's name of a tensor (the last, if it has several), and its layer; the layer is None outside of layers."""


def _megatron_names(state: TrainedState, family: MegatronNames) -> dict[Piece, tuple[Sequence[str], Fusion | None]]:
    """Maps Megatron's tensors to the names of our weights in each, and the way these are joined.

    Raises:
        CheckpointError: a weight has no corresponding tensor in Megatron.
    """
    left, found = set(state.names), dict[Piece, tuple[Sequence[str], Fusion | None]]()
    for theirs, own in family.whole.items():
        if own in left:
            found[theirs, None] = ([own], None)
    layers = {int(name[len(family.layers) :].partition(".")[0]) for name in left if name.startswith(family.layers)}
    by_ours = {tuple(fusion.names): theirs for theirs, fusion in family.inner.items()}  # the last of several names wins
    for number, (inner, theirs) in product(sorted(layers), by_ours.items()):
        ours = [f"{family.layers}{number}.{name}" for name in inner]
        if left.issuperset(ours):
            found[theirs, number] = (ours, family.inner[theirs])
    if unknown := sorted(left - {name for ours, _ in found.values() for name in ours}):
        raise CheckpointError(f"Megatron's name of {unknown[0]} is not known\n  try: --format dcp")
    return found


def _tensors(
    state: TrainedState, names: Mapping[Piece, tuple[Sequence[str], Fusion | None]]
) -> Iterator[tuple[str, LazyTensor]]:
    for kind in _KINDS:
        for piece, (ours, fusion) in names.items():
            parts = [state.weight(name) if kind == "weight" else state.moment(kind, name) for name in ours]
            yield _key(kind, piece), parts[0] if fusion is None else _joined(parts, fusion)


def _key(kind: str, piece: Piece) -> str:
    return f"{kind} {piece[1]} {piece[0]}"


def _joined(parts: Sequence[LazyTensor], fusion: Fusion) -> LazyTensor:
    """Joins weights into one layer of a stacked tensor, with a first dim of size 1."""
    shape = fusion.join([torch.empty(each.shape, device="meta") for each in parts]).shape
    return LazyTensor((1, *shape), parts[0].dtype, partial(_read_joined, parts, fusion))


def _read_joined(parts: Sequence[LazyTensor], fusion: Fusion) -> Tensor:
    return fusion.join([each.read() for each in parts]).contiguous().unsqueeze(0)


def _stacked(written: Metadata, names: Mapping[Piece, Any], family: MegatronNames) -> Metadata:
    """Converts metadata to Megatron's keys, where the layers of a kind of weight are one tensor."""
    layers = defaultdict[str, list[int | None]](list)
    for theirs, number in names:
        layers[theirs].append(number)
    same = defaultdict[tuple[str, ...], list[str]](list)  # several of Megatron's names may stand for one of ours
    for theirs, fusion in family.inner.items():
        same[tuple(fusion.names)].append(theirs)
    places = defaultdict[str, list[tuple[Any, Any]]](list)
    for index, place in written.storage_data.items():
        places[index.fqn].append((index, place))
    found = Metadata({}, storage_data={})
    for (kind, prefixes), (theirs, numbers) in product(_KINDS.items(), layers.items()):
        inner = family.inner.get(theirs)
        aliases = [theirs] if inner is None else same[tuple(inner.names)]
        for prefix, alias in product(prefixes, aliases):
            key = prefix + (alias if inner is None else f"decoder.layers.{alias}")
            chunks = []
            for number in numbers:
                source = _key(kind, (theirs, number))
                first = () if number is None else (numbers.index(number),)
                stored: Any = written.state_dict_metadata[source]
                sizes = {chunk.offsets: chunk.sizes for chunk in stored.chunks}
                for index, place in places[source]:
                    offsets = torch.Size((*first, *index.offset[len(first) :]))
                    chunks.append(ChunkStorageMetadata(offsets, sizes[index.offset]))
                    found.storage_data[MetadataIndex(key, offsets)] = place
            shape = stored.size if inner is None else torch.Size((len(numbers), *stored.size[1:]))
            properties = TensorProperties(dtype=stored.properties.dtype)
            found.state_dict_metadata[key] = TensorStorageMetadata(properties, shape, chunks)
    return found


def _write_extra_states(metadata: Metadata, config: Mapping[str, Any], path: Path) -> None:
    """Writes the linear layers' extra states, which Megatron looks for: one empty object under all keys."""
    buffer = io.BytesIO()
    torch.save([None], buffer)
    path.write_bytes(buffer.getvalue())
    count = int(config.get("num_hidden_layers") or config["n_layer"])
    experts = int(config.get("num_local_experts") or 0)
    for number, linear in product(range(count), _LINEAR):
        if experts and linear.startswith("linear_fc"):
            keys = [
                f"mlp.experts.experts.{linear}._extra_state/shard_{number}.{n}_{count}.{experts}"
                for n in range(experts)
            ]
        else:
            room = "mlp" if linear.startswith("linear_fc") else "self_attention"
            keys = [f"{room}.{linear}._extra_state/shard_{number}_{count}"]
        for key in keys:
            metadata.state_dict_metadata[f"decoder.layers.{key}"] = BytesStorageMetadata()
            place = _StorageInfo(path.name, 0, len(buffer.getvalue()))
            metadata.storage_data[MetadataIndex(f"decoder.layers.{key}")] = place


def _common(state: TrainedState, config: Mapping[str, Any]) -> dict[str, Any]:
    """Makes Megatron's common state: arguments, iteration, parameter groups and the schedule's step."""
    options = state.groups()[0]
    shared = {key: options[key] for key in ("lr", "betas", "eps")}
    decay = max(group["weight_decay"] for group in state.groups())
    experts = bool(config.get("num_local_experts"))
    groups = [
        {
            "wd_mult": multiplier,
            "lr_mult": 1.0,
            "is_expert_parallel": of_experts,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": options["lr"],
            "min_lr": None,
            "weight_decay": multiplier * decay,
            "step": float(state.optimizer_step()),
            **shared,
        }
        for of_experts, multiplier in product((False, True), (1.0, 0.0))
    ]
    sharding = "fully_reshardable"
    # with expert parallelism Megatron has two optimizers, which it looks for by number
    optimizers = [
        {"optimizer": {"param_groups": some}, "param_state_sharding_type": sharding}
        for some in (groups[:2], groups[2:])
    ]
    return {
        "args": Namespace(**_arguments(state, config)),
        "checkpoint_version": 3.0,
        "iteration": state.step,
        "optimizer": dict(enumerate(optimizers)) if experts else optimizers[0],
        "content_metadata": {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "distrib_optim_sharding_type": sharding,
        },
    }


def _arguments(state: TrainedState, config: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the arguments that Megatron-LM compares with its own on load, and the position in the data."""
    gpt = config["model_type"] == "gpt2"
    heads = config["n_head"] if gpt else config["num_attention_heads"]
    return {
        "num_layers": config["n_layer"] if gpt else config["num_hidden_layers"],
        "hidden_size": config["n_embd"] if gpt else config["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": heads if gpt else config["num_key_value_heads"],
        "group_query_attention": not gpt,
        "add_position_embedding": gpt,
        "max_position_embeddings": config["n_positions"] if gpt else config["max_position_embeddings"],
        "norm_epsilon": config["layer_norm_epsilon"] if gpt else config["rms_norm_eps"],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "padded_vocab_size": config["vocab_size"],
        "consumed_train_samples": state.samples,
        "consumed_valid_samples": 0,
        "dist_ckpt_format": "torch_dist",
    }
