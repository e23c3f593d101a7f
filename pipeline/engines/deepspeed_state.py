"""Where DeepSpeed's ZeRO optimizers keep which part of which parameter.

All of them hold fp32 weights in flat tensors, one or more per rank, and the moments in tensors of the same length in
the wrapped optimizer's state. This module finds, for every parameter, the stretch of flat tensor that is this rank's,
and which flat range of the parameter it is. Seen with deepspeed 0.19.8: `DeepSpeedZeroOptimizer` (stages 1 and 2),
`BF16_Optimizer` (stage 1 with bf16 and fp32 accumulation) and `DeepSpeedZeroOptimizer_Stage3`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.checkpoint.shards import NamedShard
from pipeline.engines.common import MOMENTS, ensure_state


@dataclass(frozen=True)
class Stretch:
    """This rank's part of a parameter.

    Attributes:
        name: Hugging Face name.
        shape: of the full parameter.
        start: first flat index within the parameter.
        flat: 1-D fp32, the flat tensor it lies in.
        at: first index within `flat`.
        length: number of elements, 0 when the rank holds none.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    flat: Tensor
    at: int
    length: int


def stretches(zero: Any, named: dict[str, nn.Parameter]) -> Iterator[Stretch]:
    """This rank's part of every parameter.

    Args:
        zero: the engine's `optimizer`.
        named: the parameters by Hugging Face name.
    """
    find = _stretch_stage3 if _is_stage3(zero) else _stretch_stage12
    for name, parameter in named.items():
        yield find(zero, name, parameter)


def named_shards(zero: Any, parameters: dict[str, nn.Parameter]) -> dict[str, NamedShard | Tensor]:
    """This rank's state under the keys of `checkpoint.named_state`. Shards are views: loading fills them in place."""
    named: dict[str, NamedShard | Tensor] = {}
    step = torch.zeros((), dtype=torch.float32)
    for s in stretches(zero, parameters):
        state = ensure_state(zero.optimizer, s.flat)
        sources = {named_state.weight_key(s.name): s.flat.data}
        sources |= {named_state.moment_key(moment, s.name): state[moment] for moment in MOMENTS}
        for key, flat in sources.items():
            named[key] = NamedShard(s.shape, start=s.start, values=flat.narrow(0, s.at, s.length))
        step = state["step"].detach().to("cpu", copy=True)
    return {**named, named_state.OPTIMIZER_STEP: step}


def reset_moments(zero: Any) -> None:
    """Undoes the dummy step by which DeepSpeed allocates optimizer state.

    It leaves the step counter at 1, which would make the first real update 0.74 of its size (bias correction).
    """
    for state in zero.optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                value.zero_()


def set_step(zero: Any, step: Tensor) -> None:
    """Sets the optimizer's step counter of every flat tensor."""
    # not by way of param_groups: stage 3 keeps them empty between steps
    for flat in _flats(zero):
        ensure_state(zero.optimizer, flat)["step"].copy_(step)


@torch.no_grad()
def refresh_weights(zero: Any) -> None:
    """Brings the model's own weights up to date with the fp32 ones, on all ranks. Collective."""
    if not _is_stage3(zero):
        zero.update_lp_params()
        return
    for low, full in zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True):
        low.data.copy_(full.data)
    # parameters below the persistence threshold stay gathered on every rank and are copies by now out of date
    if zero.persistent_parameters:
        zero.persistent_parameters[0].partition(zero.persistent_parameters, has_been_updated=False)
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def _is_stage3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _flats(zero: Any) -> list[Tensor]:
    """This rank's flat fp32 tensors, one per parameter group (stages 1, 2) or sub-group (stage 3)."""
    names = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
    flats: list[Tensor] = next(getattr(zero, name) for name in names if hasattr(zero, name))
    return flats


def _stretch_stage12(zero: Any, name: str, parameter: nn.Parameter) -> Stretch:
    shape = tuple(parameter.shape)
    mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return Stretch(name, shape, 0, _flats(zero)[0], 0, 0)
    flat = _flats(zero)[mapping.param_group_index]
    inside, outside = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Stretch(name, shape, inside.start, flat, outside.start, inside.numel)


def _stretch_stage3(zero: Any, name: str, parameter: nn.Parameter) -> Stretch:
    group, at, padded = zero.grad_position[zero.get_param_id(parameter)]
    start = zero._get_param_partition_rank(parameter) * padded
    numel: int = parameter.ds_numel  # type: ignore[attr-defined]
    # the last rank's part may reach past the end of the parameter, by the padding that makes all parts equal
    length = max(0, min(padded, numel - start))
    shape = tuple(parameter.ds_shape)  # type: ignore[attr-defined]
    return Stretch(name, shape, min(start, numel), _flats(zero)[group], at, length)
