"""Checkpoint state of a custom loop: named shards of weights and per-element optimizer states, buffers and scalars.

Keys are `weight/NAME`, `KIND/NAME` for the optimizer's tensors (`exp_avg`, `momentum_buffer`, ...), `number.KIND/NAME`
for its scalars (`step`), `buffer/NAME`. Any layout of either engine reads the checkpoints of any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foundation.errors import CheckpointError
from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.metadata import read_metadata
from pipeline.checkpoint.format.shards import NamedShard

_NUMBER, _BUFFER = "number.", "buffer/"


@dataclass(frozen=True)
class StateEntry:
    """This rank's part of one parameter and of its optimizer state.

    Attributes:
        name: name of the parameter in the user's model.
        shape: shape of the full parameter.
        start: first flat index of the part.
        holder: fp32 tensor that contains the part and that the optimizer updates.
        at: first flat index of the part within this rank's `holder`.
        length: number of elements.
        state: the optimizer's state of `holder`, read and written in place.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    holder: Tensor
    at: int
    length: int
    state: dict[str, Any]

    def shard(self, tensor: Tensor) -> NamedShard:
        """The named shard of a tensor with the layout of `holder`."""
        values = _local(tensor).view(-1).narrow(0, self.at, self.length)
        return NamedShard(self.shape, start=self.start, values=values)

    def local_values(self) -> Tensor:
        """The part's values, 1-D [length], a view."""
        return _local(self.holder.data).reshape(-1).narrow(0, self.at, self.length)


def entries(state_entries: Sequence[StateEntry], model: nn.Module) -> dict[str, NamedShard | Tensor]:
    """The state dict to write.

    Raises:
        CheckpointError: the optimizer has state that is neither per element nor a scalar.
    """
    found: dict[str, NamedShard | Tensor] = {}
    for entry in state_entries:
        found[named_state.weight_key(entry.name)] = entry.shard(entry.holder.data)
        for kind, value in entry.state.items():
            if _is_number(value):
                number = torch.tensor(float(value), dtype=torch.float64)
                found[named_state.moment_key(_NUMBER + kind, entry.name)] = number
            elif value is not None:
                _check_elementwise(kind, value, entry)
                found[named_state.moment_key(kind, entry.name)] = entry.shard(value)
    return {**found, **_buffers(model)}


def prepare_to_read(
    state_entries: Sequence[StateEntry], model: nn.Module, directory: Path
) -> tuple[dict[str, NamedShard | Tensor], dict[str, NamedShard | Tensor]]:
    """Returns the tensors to load from a checkpoint, created if the optimizer lacks them, and the scalars."""
    kinds: dict[str, list[str]] = {}
    for each in read_metadata(directory).tensors:
        kind, _, name = each.key.partition("/")
        kinds.setdefault(name, []).append(kind)
    tensors: dict[str, NamedShard | Tensor] = {**_buffers(model)}
    numbers: dict[str, NamedShard | Tensor] = {}
    for entry in state_entries:
        tensors[named_state.weight_key(entry.name)] = entry.shard(entry.holder.data)
        for kind in set(kinds.get(entry.name, [])) - {"weight", "buffer"}:
            key = named_state.moment_key(kind, entry.name)
            if kind.startswith(_NUMBER):
                numbers[key] = torch.zeros((), dtype=torch.float64)
                continue
            if not isinstance(entry.state.get(kind), Tensor):
                entry.state[kind] = torch.zeros_like(entry.holder.data, memory_format=torch.preserve_format)
            tensors[key] = entry.shard(entry.state[kind])
    return tensors, numbers


def load_scalars(state_entries: Sequence[StateEntry], numbers: Mapping[str, Any]) -> None:
    """Sets the optimizer's scalars as fp32 tensors on the CPU, like torch's optimizers."""
    for entry in state_entries:
        for key, value in numbers.items():
            kind, _, name = key.removeprefix(_NUMBER).partition("/")
            if name == entry.name:
                old = entry.state.get(kind)
                device = old.device if isinstance(old, Tensor) else "cpu"
                entry.state[kind] = value.to(device=device, dtype=torch.float32)


def check_optimizer(details: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raises CheckpointError if a checkpoint has another type of optimizer, or is not from a custom loop."""
    if "optimizer" not in details or "rates" not in details:
        raise CheckpointError("this is not a checkpoint of a custom training loop\n  try: another directory")
    stored, now = details["optimizer"], type(optimizer).__name__
    if stored != now:
        raise CheckpointError(
            f"the checkpoint is of optimizer {stored}, and this loop has {now}\n  try: the same optimizer"
        )
    if len(details["rates"]) != len(optimizer.param_groups):
        raise CheckpointError("the optimizer has another number of parameter groups than the checkpoint")


def plain_numbers(scheduler: Any) -> Any:
    """The state of a torch scheduler as plain JSON, or None without one.

    Raises:
        CheckpointError: the state is not representable in JSON.
    """
    if scheduler is None:
        return None
    try:
        return json.loads(json.dumps(scheduler.state_dict()))
    except TypeError as error:
        raise CheckpointError(f"the state of {type(scheduler).__name__} cannot be written: {error}") from None


def _buffers(model: nn.Module) -> dict[str, NamedShard | Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = model.state_dict().items()
    return {_BUFFER + name: value.detach() for name, value in kept if name not in parameters and torch.is_tensor(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def _check_elementwise(kind: str, value: Any, entry: StateEntry) -> None:
    if not isinstance(value, Tensor) or value.shape != entry.holder.shape:
        shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointError(
            f"the optimizer's state '{kind}' of {entry.name} is {shown}, and the parameter is {entry.shape}\n"
            f"  try: an optimizer with per-element state, such as AdamW or SGD"
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
