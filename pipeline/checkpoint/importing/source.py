"""An opened checkpoint of another trainer: names, shapes and a reader of each tensor; no tensor is in memory yet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import CheckpointError
from pipeline.checkpoint.write.streamed import LazyTensor
from pipeline.models.construction.buffers import buffer_shapes
from pipeline.models.construction.meta import parameter_shapes

STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names of the optimizer states of the element-wise optimizers and Muon, in torch and in DeepSpeed. Readers also return
states with other names, since dropping them would be silent."""
_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")


@dataclass(frozen=True)
class TargetModel:
    """The config's model, into which a checkpoint is imported.

    Attributes:
        parameters: name -> full shape, in the order of the model.
        buffers: name -> shape of every persistent buffer.
        aliases: second name of a tied parameter -> its name.
        hf_config: Hugging Face config as plain JSON.
        model: Hugging Face model on the meta device.
    """

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    hf_config: Mapping[str, Any]
    model: nn.Module

    @classmethod
    def of(cls, model: nn.Module, hf_config: Mapping[str, Any]) -> TargetModel:
        """Describes a model on the meta device."""
        own = {name: tuple(shape) for name, shape in parameter_shapes(model).items()}
        by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        aliases = {name: by_id[id(parameter)] for name, parameter in every if name not in own}
        buffers = {name: tuple(shape) for name, shape in buffer_shapes(model).items()}
        return cls(own, buffers, aliases, hf_config, model)


@dataclass(frozen=True)
class SourceCheckpoint:
    """Contents of a checkpoint of another trainer.

    Attributes:
        path: path of the checkpoint.
        kind: trainer that wrote it, for people: "DeepSpeed ZeRO-3 of 2 ranks".
        step: optimizer steps done.
        weights: Hugging Face parameter name -> value; the fp32 master weight if there is one.
        states: optimizer state -> Hugging Face parameter name -> value.
        optimizer_step: step counter of the optimizer (bias correction); None if it keeps none.
        groups: hyperparameters of each parameter group: lr (of the next step), betas, weight_decay, ...
        members: names of the parameters in each group; empty if the checkpoint does not record them.
        samples: number of samples trained on; None if not recorded.
        hf_config: contents of the checkpoint's config.json; None if it has none.
        loss_scale: (scale, steps since the last overflow, overflows left before it is lowered) of fp16, or None.
        left_out: descriptions of the contents that are not imported, for people.
        answers: place where a step is recorded -> that step, if they disagree; empty if none is recorded; else None.
    """

    path: Path
    kind: str
    step: int
    weights: Mapping[str, LazyTensor]
    states: Mapping[str, Mapping[str, LazyTensor]]
    optimizer_step: float | None = None
    groups: Sequence[Mapping[str, Any]] = ()
    members: Sequence[Sequence[str]] = ()
    samples: int | None = None
    hf_config: Mapping[str, Any] | None = None
    loss_scale: tuple[float, float, float] | None = None
    left_out: Sequence[str] = field(default_factory=tuple)
    answers: Mapping[str, int] | None = None


def stored(tensor: Tensor) -> LazyTensor:
    """Wraps a tensor unchanged; if its file is memory-mapped, the tensor is read when it is used."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def is_state(value: Any) -> bool:
    """Whether an entry of an optimizer's state has a value per element, unlike a step counter."""
    return isinstance(value, Tensor) and value.ndim > 0


def from_pieces(name: str, shape: Sequence[int], pieces: Sequence[Tensor], where: Path) -> LazyTensor:
    """Makes a tensor from consecutive flat pieces.

    Raises:
        CheckpointError: the pieces do not have as many elements as the tensor.
    """
    shape = tuple(shape)
    numel, found = torch.Size(shape).numel(), sum(piece.numel() for piece in pieces)
    if found != numel:
        raise CheckpointError(
            f"{where}: {name} {shape} has {numel:,} elements, and the files of all ranks hold {found:,}\n"
            f"  try: the checkpoint of another step; this one was not written whole"
        )
    dtype = pieces[0].dtype if pieces else torch.float32
    return LazyTensor(shape, dtype, lambda: torch.cat([piece.reshape(-1) for piece in pieces]).view(shape))


def hugging_face_name(name: str) -> str:
    """Removes the parts that DDP, FSDP, activation checkpointing and torch.compile add to a parameter's name."""
    return _WRAPPERS.sub(r"\1", name).replace("..", ".").lstrip(".")


def one_step_counter(counters: Iterable[Any], where: Path) -> float | None:
    """Returns the step counter that all parameters share; None if there is none.

    Raises:
        CheckpointError: the counters differ.
    """
    found = sorted({float(counter) for counter in counters if counter is not None})
    if len(found) > 1:
        raise CheckpointError(
            f"{where}: the optimizer has made {found[0]:g} steps with some parameters and {found[-1]:g} with others\n"
            f"  try: nothing: a run has one step counter; take the weights alone, as model.path"
        )
    return found[0] if found else None
