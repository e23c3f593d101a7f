"""Checkpoints of a loop of one's own: named shards of whatever the optimizer keeps per element, buffers and numbers.

Keys are `weight/NAME`, `KIND/NAME` for the optimizer's tensors (`exp_avg`, `momentum_buffer`, ...), `number.KIND/NAME`
for its numbers (`step`), `buffer/NAME`. Any layout of either engine reads what any other wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headrace.base.errors import CheckpointError
from pipeline.checkpoint import named_state
from pipeline.checkpoint.shards import NamedShard

_NUMBER, _BUFFER = "number.", "buffer/"


@dataclass(frozen=True)
class StateEntry:
    """This rank's part of one parameter, and of what the optimizer keeps for it.

    Attributes:
        name: of the parameter in the user's model.
        shape: of the full parameter.
        start: first flat index of the part.
        holder: fp32 tensor that the optimizer updates; the part lies in it.
        at: first flat index of the part within this rank's `holder`.
        length: number of elements.
        state: the optimizer's state of `holder`, to be read and written.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    holder: Tensor
    at: int
    length: int
    state: dict[str, Any]

    def shard(self, tensor: Tensor) -> NamedShard:
        """The named shard of a tensor that lies as `holder` does."""
        values = _local(tensor).view(-1).narrow(0, self.at, self.length)
        return NamedShard(self.shape, start=self.start, values=values)


def entries(pieces: Sequence[StateEntry], model: nn.Module) -> dict[str, NamedShard | Tensor]:
    """What is written.

    Raises:
        CheckpointError: the optimizer keeps something that is neither per element nor a number.
    """
    found: dict[str, NamedShard | Tensor] = {}
    for piece in pieces:
        found[named_state.weight_key(piece.name)] = piece.shard(piece.holder.data)
        for kind, value in piece.state.items():
            if _is_number(value):
                number = torch.tensor(float(value), dtype=torch.float64)
                found[named_state.moment_key(_NUMBER + kind, piece.name)] = number
            elif value is not None:
                _check_elementwise(kind, value, piece)
                found[named_state.moment_key(kind, piece.name)] = piece.shard(value)
    return {**found, **_buffers(model)}


def prepare_to_read(
    pieces: Sequence[StateEntry], model: nn.Module, directory: Path
) -> tuple[dict[str, NamedShard | Tensor], dict[str, NamedShard | Tensor]]:
    """What is to be filled from a checkpoint: tensors, made where the optimizer does not have them yet, and numbers."""
    stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    kinds: dict[str, list[str]] = {}
    for key in stored:
        kind, _, name = key.partition("/")
        kinds.setdefault(name, []).append(kind)
    tensors: dict[str, NamedShard | Tensor] = {**_buffers(model)}
    numbers: dict[str, NamedShard | Tensor] = {}
    for piece in pieces:
        tensors[named_state.weight_key(piece.name)] = piece.shard(piece.holder.data)
        for kind in set(kinds.get(piece.name, [])) - {"weight", "buffer"}:
            key = named_state.moment_key(kind, piece.name)
            if kind.startswith(_NUMBER):
                numbers[key] = torch.zeros((), dtype=torch.float64)
                continue
            if not isinstance(piece.state.get(kind), Tensor):
                piece.state[kind] = torch.zeros_like(piece.holder.data, memory_format=torch.preserve_format)
            tensors[key] = piece.shard(piece.state[kind])
    return tensors, numbers


def take_scalars(pieces: Sequence[StateEntry], numbers: Mapping[str, Any]) -> None:
    """Gives the optimizer the numbers that were read, as tensors on the CPU, as torch's optimizers keep them."""
    for piece in pieces:
        for key, value in numbers.items():
            kind, _, name = key.removeprefix(_NUMBER).partition("/")
            if name == piece.name:
                old = piece.state.get(kind)
                device = old.device if isinstance(old, Tensor) else "cpu"
                piece.state[kind] = value.to(device=device, dtype=torch.float32)


def check_optimizer(details: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raises CheckpointError when a checkpoint is of another kind of optimizer, or of none of these loops."""
    if "optimizer" not in details or "rates" not in details:
        raise CheckpointError("this is no checkpoint of a loop of one's own\n  try: another directory")
    was, now = details["optimizer"], type(optimizer).__name__
    if was != now:
        raise CheckpointError(f"the checkpoint is of {was}, and this loop has {now}\n  try: the same optimizer")
    if len(details["rates"]) != len(optimizer.param_groups):
        raise CheckpointError("the optimizer has another number of parameter groups than the checkpoint")


def plain_numbers(scheduler: Any) -> Any:
    """The state of a torch scheduler as plain JSON, or None without one.

    Raises:
        CheckpointError: it holds what JSON cannot.
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


def _check_elementwise(kind: str, value: Any, piece: StateEntry) -> None:
    if not isinstance(value, Tensor) or value.shape != piece.holder.shape:
        shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointError(
            f"the optimizer keeps '{kind}' of {piece.name} as {shown}, where the parameter is {piece.shape}\n"
            f"  try: an optimizer that keeps its state per element, such as AdamW or SGD"
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
