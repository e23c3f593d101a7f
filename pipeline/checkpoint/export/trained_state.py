"""Reads a checkpoint's weights and optimizer states by name, to write them in formats of other trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import CheckpointError
from pipeline.checkpoint.checkpoint import MERGED, Checkpoint
from pipeline.checkpoint.damage import find_damage
from pipeline.checkpoint.export.trained_model import trained_model
from pipeline.checkpoint.format.metadata import read_metadata
from pipeline.checkpoint.named_state import OPTIMIZER_STEP, buffer_key, moment_key, weight_key
from pipeline.checkpoint.read_shards import ShardReader
from pipeline.checkpoint.write.streamed import LazyTensor
from pipeline.config.rules.curve import recorded_schedule
from pipeline.config.sections.optimizers import KINDS, kind_of
from pipeline.models.decayed import is_decayed


class TrainedState:
    """A checkpoint of a run of `headrace train`, tensor by tensor.

    Args:
        checkpoint: the checkpoint.

    Attributes:
        step: last step of the checkpoint.
        samples: number of samples trained on.
        model: the model, on the meta device.

    Raises:
        CheckpointError: the checkpoint is damaged, or from a custom loop or an optimizer other than AdamW.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        manifest = checkpoint.manifest
        if damage := find_damage(checkpoint):
            raise CheckpointError(f"{checkpoint.path} is damaged: {damage}\n  try: an older checkpoint of the run")
        if "hf_config" not in manifest.details:
            why = "it was written by a custom training loop, which does not record its model"
            raise CheckpointError(f"{checkpoint.path} cannot be exported: {why}\n  try: a checkpoint of headrace train")
        if MERGED in manifest.details:
            why = "it is merged from others: it has weights and no optimizer states"
            raise CheckpointError(f"{checkpoint.path}: {why}\n  try: headrace export without --format, the model alone")
        curve = manifest.details["curve"]
        if kind_of(curve["optimizer"]) != KINDS[0]:
            why = f"its optimizer is {kind_of(curve['optimizer'])}, and other trainers exchange AdamW's states only"
            raise CheckpointError(f"{checkpoint.path}: {why}\n  try: headrace export without --format, the model alone")
        self.step, self.samples = checkpoint.step, int(manifest.details["samples"])
        self.model: nn.Module = trained_model(manifest, dtype=torch.float32)
        self._curve, self._metadata = curve, read_metadata(checkpoint.path)
        self._reader = ShardReader(checkpoint.path, self._metadata)
        self._path: Path = checkpoint.path

    @cached_property
    def names(self) -> list[str]:
        """Names of the parameters, in the order of the model."""
        return [name for name, _ in self.model.named_parameters()]

    def aliases(self) -> Iterator[tuple[str, str]]:
        """Yields (other name, name) of every tied parameter."""
        owner = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if owner[id(parameter)] != name:
                yield name, owner[id(parameter)]

    def weight(self, name: str) -> LazyTensor:
        """Returns a parameter's fp32 master weight."""
        return self._tensor(weight_key(name))

    def moment(self, kind: str, name: str) -> LazyTensor:
        """Returns an optimizer state of a parameter: exp_avg or exp_avg_sq, fp32."""
        return self._tensor(moment_key(kind, name))

    def buffers(self) -> dict[str, LazyTensor]:
        """Returns the persistent buffers by name."""
        prefix = buffer_key("")
        keys = [each.key for each in self._metadata.tensors if each.key.startswith(prefix)]
        return {key.removeprefix(prefix): self._tensor(key) for key in keys}

    def optimizer_step(self) -> Tensor:
        """Returns the step counter of the optimizer: fp32 scalar."""
        return self._tensor(OPTIMIZER_STEP).read()

    def groups(self) -> list[dict[str, Any]]:
        """Returns torch.optim.AdamW's parameter groups, with names as `params`: with weight decay, then without it."""
        params = self._curve["optimizer"]["params"]
        options: dict[str, Any] = {
            "lr": recorded_schedule(self._curve, self.step + 1).lr(self.step + 1),
            "betas": tuple(params["betas"] or (0.9, 0.999)),
            "eps": 1e-8 if params["eps"] is None else params["eps"],
        }
        decayed = {name: is_decayed(self.model, name, parameter) for name, parameter in self.model.named_parameters()}
        groups = []
        for value in (True, False):
            names = [name for name in self.names if decayed[name] is value]
            decay = params["weight_decay"] if value else 0.0
            plain = torch.optim.AdamW([torch.empty(1)], **options, weight_decay=decay).param_groups[0]
            groups.append({**plain, "params": names})
        return [group for group in groups if group["params"]]

    def _tensor(self, key: str) -> LazyTensor:
        if key not in self._metadata.table.index:
            raise CheckpointError(f"{self._path} has no {key}\n  try: headrace checkpoint verify {self._path}")
        stored = self._metadata.tensors[self._metadata.table.index[key]]
        read: Callable[[], Tensor] = partial(self._read, key, stored.shape, stored.dtype)
        return LazyTensor(tuple(stored.shape), stored.dtype, read)

    def _read(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        value = torch.empty(shape, dtype=dtype)
        self._reader.read({key: value})
        return value
