"""The final weights of a custom loop: gathered from the shards of any layout, and written as a model folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from foundation.directory import commit, fresh_staging
from foundation.errors import DataError
from pipeline.own_loop.state import StateEntry


@torch.no_grad()
def full_state_dict(
    state_entries: Sequence[StateEntry], module: nn.Module, *, device: torch.device
) -> dict[str, Tensor]:
    """Gathers full weights and buffers on rank 0's CPU (empty elsewhere), in the order of the module. Collective.

    Args:
        state_entries: this rank's part of every parameter, in the same order on all ranks.
        module: the user's model; only the names of its weights are used.
        device: this rank's device.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    ranges: list[Any] = [[(entry.start, entry.length) for entry in state_entries]] * ranks
    if ranks > 1:
        dist.all_gather_object(ranges, ranges[0])
    found: dict[str, Tensor] = {}
    for index, entry in enumerate(state_entries):
        full = _full(entry, [each[index] for each in ranges], device)
        if full is not None:
            found[entry.name] = full
    return _renamed(found, module) if found else {}


def write_model(
    module: nn.Module, weights: Mapping[str, Tensor], folder: Path, *, dtype: torch.dtype, steps: int
) -> None:
    """Writes a model folder, complete or absent; on one rank.

    Raises:
        DataError: the folder exists.
    """
    if folder.exists():
        raise DataError(f"{folder} exists already\n  try: remove it, or choose another folder")
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    cast = {name: _cast(tensor, dtype) if name in parameters else tensor for name, tensor in weights.items()}
    staging = fresh_staging(folder)
    try:
        save_pretrained: Any = getattr(module, "save_pretrained", None)
        if save_pretrained is not None:
            alone = {name: each.clone() for name, each in cast.items()} if _drop_old_ties(module) else None
            save_pretrained(staging, state_dict=alone or _sharing(cast, weights))
            _set_dtype(staging / "config.json", dtype)
        else:
            save_file(_once(cast, weights), staging / "model.safetensors")
        commit(staging, folder, kind="model", config={}, details={"steps": steps, "dtype": str(dtype)})
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # on success it has been renamed by then


def _full(entry: StateEntry, ranges: Sequence[tuple[int, int]], device: torch.device) -> Tensor | None:
    """Gathers a parameter on rank 0, each range from one rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    first: dict[tuple[int, int], int] = {}
    for each, span in enumerate(ranges):
        if span[1]:
            first.setdefault(span, each)  # replicas are not summed
    values = entry.local_values()
    total = torch.zeros(entry.shape, dtype=values.dtype, device=device)
    assert sum(length for _, length in first) == total.numel(), (entry.name, first)
    if first.get((entry.start, entry.length)) == rank:
        total.view(-1).narrow(0, entry.start, entry.length).copy_(values)
    if set(first.values()) - {0}:
        dist.reduce(total, dst=0)
    return total.cpu() if rank == 0 else None


def _renamed(found: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Lists weights under all names of tied parameters, and the buffers, in the module's order."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    aliases = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict()
    return {
        name: found[aliases[name]] if name in aliases else value.detach().cpu().clone()
        for name, value in state.items()
        if torch.is_tensor(value)
    }


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _sharing(cast: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights as one tensor, which transformers writes once."""
    by_original: dict[int, Tensor] = {}
    return {name: by_original.setdefault(id(weights[name]), tensor) for name, tensor in cast.items()}


def _drop_old_ties(module: nn.Module) -> bool:
    """Clears a model's list of tied weights in transformers 4's form, where 5 fails; returns whether it had one.

    Tied weights are then written under each of their names.
    """
    listed: list[Any] = [m for m in module.modules() if isinstance(getattr(m, "_tied_weights_keys", None), list)]
    for each in listed:
        each._tied_weights_keys = {}
    return bool(listed)


def _once(cast: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights under their first name only, as `safetensors.torch.load_model` expects them."""
    first: dict[int, str] = {}
    names = [name for name in cast if first.setdefault(id(weights[name]), name) == name]
    return {name: cast[name].clone().contiguous() for name in names}


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    """Corrects the dtype in config.json: transformers writes the module's, which may be bf16 beside fp32 masters."""
    if not config.exists():
        return
    fields = json.loads(config.read_text())
    key = "torch_dtype" if "torch_dtype" in fields else "dtype"
    config.write_text(json.dumps({**fields, key: str(dtype).removeprefix("torch.")}, indent=2) + "\n")
