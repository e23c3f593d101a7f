"""Cuts the kept units out of a model's files, tensor by tensor, and writes a Hugging Face folder.

A norm over fewer channels divides by the root mean square of the channels that are left. Let x be the residual of D
channels, and let the D' kept ones have the share e of its sum of squares (over the calibration tokens). The root mean
square becomes sqrt(e D / D') times the old one, and the norm's weight is multiplied by this factor: its output keeps
its scale. A LayerNorm (GPT-2) first subtracts the mean over the channels: there e is the share after the subtraction,
and the mean of the kept channels stands for the mean of all. Channels that are zero (in a LayerNorm: equal to the mean)
have no share, and cutting them changes nothing. To make this exact, rms_norm_eps is multiplied by D / D'. In Qwen3 it
is also the epsilon of the norms of queries and keys, a millionth of their mean squares. Gemma multiplies its embeddings
by sqrt(D): they are multiplied by sqrt(D / D'), and where the head is the embedding the last norm is divided by it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from foundation.directory import write_json
from pipeline.compress.pruning.axes import EXPERTS, FFN, GROUPS, HIDDEN, LAYERS, PrunableTensor
from pipeline.compress.pruning.rules import PruningPlan
from pipeline.compress.pruning.search import Shape
from pipeline.compress.pruning.selection import Kept
from pipeline.models.folder.beside_weights import copy_generation
from pipeline.models.folder.model_folder import CONFIG
from pipeline.models.folder.weight_files import INDEX, SINGLE, HfFields
from pipeline.models.layers import of_kept_layers

_EMBEDDING, _LAST_NORM = "model.embed_tokens.weight", "model.norm.weight"


def write_folder(
    plan: PruningPlan,
    shape: Shape,
    kept: Kept,
    sums: Mapping[str, Tensor],
    folder: Path,
) -> None:
    """Writes config.json, safetensors and generation_config.json; no tokenizer.

    Args:
        plan: plan of the pruning.
        shape: axis -> size of the result.
        kept: indices of the kept units.
        sums: sums of `importance`, for the scales of the norms.
        folder: existing folder to write into.
    """
    scales = norm_scales(plan, kept, sums)
    files = [file.name for file in plan.source.files]
    written: dict[str, str] = {}
    for name in files:
        if cut := _cut_file(plan, kept, name, scales=scales):
            save_file(cut, folder / name, metadata={"format": "pt"})
            written |= dict.fromkeys(cut, name)
    if files != [SINGLE]:
        total = sum((folder / name).stat().st_size for name in set(written.values()))
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": written})
    write_json(folder / CONFIG, config_of(plan, shape, kept.layers))
    copy_generation(plan.source.path, folder)


def _cut_file(plan: PruningPlan, kept: Kept, name: str, *, scales: Mapping[str, float]) -> dict[str, Tensor]:
    """Kept tensors of one file, cut: new name -> tensor."""
    cut, dtype, kept_in_fp32 = {}, getattr(torch, plan.dtype), plan.source.fp32_beside
    with safe_open(plan.source.path / name, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            tensor = plan.anatomy.tensors[key]
            if (new := renamed(key, tensor, kept)) is None:
                continue
            made = cut_tensor(file.get_tensor(key), tensor, kept)
            made = _scaled(made, scales.get(key), unit_offset=_offset(plan, key))
            cast = made.is_floating_point() and key not in kept_in_fp32
            cut[new] = (made.to(dtype) if cast else made).contiguous()
    return cut


def renamed(name: str, tensor: PrunableTensor, kept: Kept) -> str | None:
    """The tensor's name in the result, with its new layer and expert numbers; None if the tensor is not kept."""
    layer, expert = tensor.layer, tensor.expert
    if expert is not None and layer is not None and (chosen := kept.experts.get(layer)) is not None:
        if expert not in chosen:
            return None
        name = name.replace(f".experts.{expert}.", f".experts.{chosen.tolist().index(expert)}.", 1)
    if layer is None:
        return name
    if layer not in kept.layers:
        return None
    number = kept.layers.tolist().index(layer)
    words = name.split(".")
    place = words.index(str(layer))
    return ".".join([*words[:place], str(number), *words[place + 1 :]])


def cut_tensor(value: Tensor, tensor: PrunableTensor, kept: Kept) -> Tensor:
    """The kept part of a stored tensor."""
    for dim, (axis, width) in enumerate(tensor.dims):
        units = None if axis is None else kept.of(axis, tensor.layer, tensor.expert)
        if units is not None:
            parts = tensor.parts if axis == GROUPS else 1
            value = value.index_select(dim, spread(units, width, parts=parts, size=value.shape[dim]))
    return value


def spread(units: Tensor, width: int, *, parts: int = 1, size: int = 0) -> Tensor:
    """Indices of the features of units that have `width` features each.

    Args:
        units: indices of units.
        width: features of a unit, in all parts together.
        parts: number of consecutive parts of the dim; a unit has an equal share of its features in each.
        size: size of the dim; only needed if it has several parts.
    """
    own = (units[:, None] * (width // parts) + torch.arange(width // parts)).view(-1)
    return (torch.arange(parts)[:, None] * (size // parts) + own).view(-1)


def norm_scales(plan: PruningPlan, kept: Kept, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Factors of tensors: stored name -> factor; empty if no residual channel is cut."""
    if kept.hidden is None:
        return {}
    channels = plan.anatomy.sizes[HIDDEN]
    wider = channels / len(kept.hidden)
    scales = {}
    for name, tensor in plan.anatomy.tensors.items():
        module = name.removesuffix(".weight")
        squares = sums.get(f"{module}.in.square", sums.get(f"transformer.{module}.in.square"))
        if squares is not None and tensor.dims == ((HIDDEN, 1),):
            total = float(squares.sum())
            share = float(squares[kept.hidden].sum()) / total if total else 1.0
            scales[name] = (share * wider) ** 0.5
    if plan.anatomy.architecture.scaled_embedding:
        scales[_EMBEDDING] = wider**0.5
        if plan.source.tied:
            scales[_LAST_NORM] /= wider**0.5
    return scales


def _offset(plan: PruningPlan, name: str) -> bool:
    return plan.anatomy.architecture.unit_offset and name != _EMBEDDING


def _scaled(value: Tensor, scale: float | None, *, unit_offset: bool) -> Tensor:
    if scale is None:
        return value
    wide = value.double()
    return (wide + 1) * scale - 1 if unit_offset else wide * scale


def write_config(plan: PruningPlan, shape: Shape, folder: Path) -> None:
    """Writes a folder with the config of a future result and an empty weight file.

    The first layers stand for the kept ones, which are not known yet.
    """
    folder.mkdir()
    write_json(folder / CONFIG, config_of(plan, shape, torch.arange(shape.get(LAYERS, plan.anatomy.sizes[LAYERS]))))
    save_file({}, folder / SINGLE)


def config_of(plan: PruningPlan, shape: Shape, layers: Tensor) -> HfFields:
    """Makes config.json of the result, with the decoder layers of the given numbers, int64 [L']."""
    config, sizes, keys = copy.deepcopy(plan.source.config), plan.anatomy.sizes, plan.anatomy.keys
    config |= {keys[axis]: shape[axis] for axis in shape if axis != FFN or FFN in sizes}
    config["dtype"] = plan.dtype
    config.pop("torch_dtype", None)
    if GROUPS in sizes:
        config |= _of_heads(plan, shape)
    if HIDDEN in sizes and shape[HIDDEN] < sizes[HIDDEN]:
        whole = AutoConfig.from_pretrained(
            plan.source.path, local_files_only=True, trust_remote_code=False
        )  # has the keys that the file leaves out
        key = plan.anatomy.architecture.norm_eps
        config[key] = float(getattr(whole, key)) * sizes[HIDDEN] / shape[HIDDEN]
    if EXPERTS in sizes:
        config["num_experts_per_tok"] = min(plan.anatomy.chosen_experts, shape[EXPERTS])
    return config | _of_layers(plan, layers)


def _of_heads(plan: PruningPlan, shape: Shape) -> HfFields:
    if plan.anatomy.architecture.heads_of_hidden:
        return {}
    groups, heads = plan.anatomy.sizes[GROUPS], int(plan.source.config["num_attention_heads"])
    return {"head_dim": plan.anatomy.head_size, "num_attention_heads": heads // groups * shape[GROUPS]}


def _of_layers(plan: PruningPlan, layers: Tensor) -> HfFields:
    """Fields that describe single layers, for the kept layers; includes fields that transformers derives by number."""
    total = plan.anatomy.sizes[LAYERS]
    if len(layers) == total:
        return {}
    whole = AutoConfig.from_pretrained(plan.source.path, local_files_only=True, trust_remote_code=False).to_dict()
    return of_kept_layers(whole, layers.tolist(), total=total)
