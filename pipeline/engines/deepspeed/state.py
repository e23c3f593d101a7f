"""Where DeepSpeed's optimizers keep which part of which parameter.

All of them hold fp32 weights in flat tensors, one or more per rank, and the moments in tensors of the same length in
the wrapped optimizer's state. This module finds, for every parameter, the stretch of flat tensor that is this rank's,
and which flat range of the parameter it is. Seen with deepspeed 0.19.8: `DeepSpeedZeroOptimizer` (stages 1 and 2),
`BF16_Optimizer` (stage 1 with bf16 and fp32 accumulation) and `DeepSpeedZeroOptimizer_Stage3`, whose flat tensors may
lie on a disk (see `deepspeed_offload`); and our own `Replicated` (stage 0), where a flat tensor is one parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.checkpoint.shards import NamedShard
from pipeline.engines.common import MOMENTS, ensure_state
from pipeline.engines.deepspeed.offload import brought_in, is_swapped
from pipeline.engines.deepspeed.replicated import Replicated
from pipeline.engines.replica import Replica
from pipeline.parallel.assemble import Assembled
from pipeline.parallel.mesh import Mesh

_WEIGHT = "weight"


@dataclass(frozen=True)
class FlatSlice:
    """This rank's part of a parameter.

    Attributes:
        name: Hugging Face name.
        start: first flat index within what tensor parallelism left of the parameter.
        flat: number of the flat tensor it lies in.
        at: first index within that.
        length: number of elements, 0 when the rank holds none.
    """

    name: str
    start: int
    flat: int
    at: int
    length: int


@dataclass(frozen=True)
class LocalState:
    """This rank's state, to be written from or read into.

    Attributes:
        named: under the keys of `checkpoint.named_state`; values are views, or copies of what lies on a disk.
        copies: number of a flat tensor on a disk -> copies of it and of its moments.
    """

    named: dict[str, NamedShard | Tensor]
    copies: dict[int, dict[str, Tensor]]


def collect_local_state(zero: Any, assembled: Assembled) -> LocalState:
    """This rank's state. What lies on a disk is brought into host memory.

    Args:
        zero: the engine's `optimizer`.
        assembled: this rank's part of the model.
    """
    flats = [_contents(zero, number) for number in range(len(flat_tensors(zero)))]
    copies = {number: flats[number] for number in range(len(flats)) if is_swapped(zero, number)}
    named: dict[str, NamedShard | Tensor] = {}
    for s in flat_slices(zero, assembled.decoder.named()):
        shape, box = assembled.shapes[s.name], assembled.box(s.name)
        for kind in (_WEIGHT, *MOMENTS):
            key = named_state.weight_key(s.name) if kind == _WEIGHT else named_state.moment_key(kind, s.name)
            values = flats[s.flat][kind].view(-1).narrow(0, s.at, s.length)
            named[key] = NamedShard(shape, start=s.start, values=values, box=box)
    state = _adamw(zero).state.get(flat_tensors(zero)[-1], {})
    step = state["step"].detach().to("cpu", copy=True) if "step" in state else torch.zeros((), dtype=torch.float32)
    return LocalState({**named, named_state.OPTIMIZER_STEP: step}, copies)


@torch.no_grad()
def restore_local_state(zero: Any, held: LocalState) -> None:
    """Goes on from a state that was read: disk, step counters and the model's own weights. Collective."""
    step = held.named[named_state.OPTIMIZER_STEP]
    assert isinstance(step, Tensor)
    for number, flat in enumerate(flat_tensors(zero)):
        with brought_in(zero, number, write=True):
            state = ensure_state(_adamw(zero), flat)
            for kind, values in held.copies.get(number, {}).items():
                (flat.data if kind == _WEIGHT else state[kind]).copy_(values)
            state["step"].copy_(step)  # not by way of param_groups: stage 3 keeps them empty between steps
            if _is_stage3(zero):
                zero._reassign_or_swap_out_partitioned_parameters(number)
    share_weights(zero)


def reset_moments(zero: Any) -> None:
    """Undoes the dummy step by which some of DeepSpeed's optimizers allocate their state.

    It leaves the step counter at 1, which would make the first real update 0.74 of its size (bias correction).
    """
    for state in _adamw(zero).state.values():
        for value in state.values():
            if torch.is_tensor(value):
                value.zero_()


def _contents(zero: Any, number: int) -> dict[str, Tensor]:
    """A flat tensor and its moments; copies when they lie on a disk."""
    flat = flat_tensors(zero)[number]
    if not is_swapped(zero, number):
        state = ensure_state(_adamw(zero), flat)
        return {_WEIGHT: flat.data, **{moment: state[moment] for moment in MOMENTS}}
    with brought_in(zero, number, write=False):
        state = _adamw(zero).state.get(flat, {})
        weight = flat.data.clone()
        moments = {m: state[m].clone() if m in state else torch.zeros_like(weight) for m in MOMENTS}
    return {_WEIGHT: weight, **moments}


def share_weights(zero: Any) -> None:
    """Brings the model's own weights up to date with the fp32 ones of all ranks."""
    if isinstance(zero, Replicated):
        zero.refresh_weights()
    elif not _is_stage3(zero):
        zero.update_lp_params()
    else:
        # whatever is still gathered, after an evaluation or because it always is, is a copy by now out of date
        zero.empty_partition_cache()
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def replicas(zero: Any, assembled: Assembled, mesh: Mesh | None, ends: dist.ProcessGroup | None) -> Iterator[Replica]:
    """The weights of this rank that other ranks hold too: fp32 at stage 0, what is computed with at stages 1 to 3.

    At stage 3 data ranks hold no copies, and partitions that lie on a disk are passed over.

    Args:
        zero: the engine's `optimizer`.
        assembled: this rank's part of the model.
        mesh: this rank's place; None for one process.
        ends: the ranks that hold a parameter with this one, being the two ends of a pipeline.
    """
    if mesh is None:
        return
    data, tensor = mesh.group("data"), mesh.group("tp")
    for name, weight in assembled.decoder.named().items():
        values, copies = weight.data, data
        if isinstance(zero, Replicated):
            values = zero.masters[name].data
        elif _is_stage3(zero):
            part: Any = weight.ds_tensor  # type: ignore[attr-defined]
            if part.status != PartitionedParamStatus.AVAILABLE:
                continue
            values, copies = part.data, None
        groups = (copies, tensor if assembled.box(name) is None else None, ends if name in assembled.shared else None)
        yield from (Replica(name, values, group) for group in groups if group is not None)


def _adamw(zero: Any) -> Any:
    """The wrapped optimizer, which holds the moments."""
    return zero if isinstance(zero, Replicated) else zero.optimizer


def _is_stage3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def flat_tensors(zero: Any) -> list[Tensor]:
    """This rank's flat fp32 tensors: per parameter (stage 0), parameter group (1, 2) or sub-group (3)."""
    if isinstance(zero, Replicated):
        return list(zero.masters.values())
    names = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
    flats: list[Tensor] = next(getattr(zero, name) for name in names if hasattr(zero, name))
    return flats


def flat_slices(zero: Any, named: dict[str, nn.Parameter]) -> Iterator[FlatSlice]:
    """This rank's part of every parameter.

    Args:
        zero: DeepSpeed's optimizer.
        named: the parameters by Hugging Face name.
    """
    for number, (name, parameter) in enumerate(named.items()):
        if isinstance(zero, Replicated):
            yield FlatSlice(name, 0, number, 0, parameter.numel())
        else:
            yield (_stretch_stage3 if _is_stage3(zero) else _stretch_stage12)(zero, name, parameter)


def _stretch_stage12(_zero: Any, name: str, parameter: nn.Parameter) -> FlatSlice:
    mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return FlatSlice(name, 0, 0, 0, 0)
    inside, outside = mapping.lp_fragment_address, mapping.hp_fragment_address
    return FlatSlice(name, inside.start, mapping.param_group_index, outside.start, inside.numel)


def _stretch_stage3(zero: Any, name: str, parameter: nn.Parameter) -> FlatSlice:
    group, at, padded = zero.grad_position[zero.get_param_id(parameter)]
    start = zero._get_param_partition_rank(parameter) * padded
    numel: int = parameter.ds_numel  # type: ignore[attr-defined]
    # the last rank's part may reach past the end of the parameter, by the padding that makes all parts equal
    length = max(0, min(padded, numel - start))
    return FlatSlice(name, min(start, numel), group, at, length)
