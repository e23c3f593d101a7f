"""Maps the flat partitions of DeepSpeed's ZeRO optimizers to named shards, to save and restore the state.

All these optimizers have fp32 weights in flat tensors, one or more per rank, and states in tensors of the same length
in the wrapped optimizer's state. For every parameter this module finds this rank's slice of a flat tensor, and the flat
range of the parameter in that slice. Verified with deepspeed 0.19.8: `DeepSpeedZeroOptimizer` (stages 1 and 2),
`BF16_Optimizer` (stage 1 with bf16 and fp32 accumulation) and `DeepSpeedZeroOptimizer_Stage3`, whose flat tensors may
be offloaded to a disk (see `offload`); and our `ReplicatedOptimizer` (stage 0), where a flat tensor is one parameter.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.config.sections.optimizers import OptimizerKind
from pipeline.engines.base import Replica
from pipeline.engines.deepspeed.offload import is_swapped, swapped_in
from pipeline.engines.deepspeed.replicated import ReplicatedOptimizer
from pipeline.engines.optim.matrix_exchange import Form, HeldShard
from pipeline.engines.optim.state import ensure_state, kind_of_group, set_step_counter, step_counter
from pipeline.engines.parallel.assemble import LocalModel
from pipeline.engines.parallel.mesh import Mesh

_WEIGHT = "weight"


@dataclass(frozen=True)
class FlatSlice:
    """This rank's shard of a parameter, as a slice of a flat tensor.

    Attributes:
        name: Hugging Face name.
        start: first flat index within the tensor-parallel shard of the parameter.
        flat: index of the flat tensor that contains the shard.
        offset: first index within that flat tensor.
        length: number of elements; 0 if the rank has none.
    """

    name: str
    start: int
    flat: int
    offset: int
    length: int


@dataclass(frozen=True)
class LocalState:
    """This rank's state, to save from or load into.

    Attributes:
        named: shards and tensors by key of `checkpoint.named_state`: views, or copies of values offloaded to a disk.
        copies: index of a flat tensor on a disk -> copies of the tensor and of its states.
    """

    named: dict[str, NamedShard | Tensor]
    copies: dict[int, dict[str, Tensor]]


def collect_local_state(
    optimizer: Any, local_model: LocalModel, kind: OptimizerKind, *, matrices: Container[str]
) -> LocalState:
    """Collects this rank's state; reads state offloaded to a disk into host memory.

    Args:
        optimizer: the engine's `optimizer`.
        local_model: this rank's part of the model.
        kind: kind of the wrapped optimizer.
        matrices: names of the parameters that the optimizer treats as hidden matrices.
    """
    flats = [_weight_and_states(optimizer, index, kind) for index in range(len(flat_tensors(optimizer)))]
    copies = {index: flat for index, flat in enumerate(flats) if is_swapped(optimizer, index)}
    named: dict[str, NamedShard | Tensor] = {}
    for s in flat_slices(optimizer, local_model.decoder.parameters_by_name()):
        shape, box = local_model.shapes[s.name], local_model.box(s.name)
        own = kind.of(matrix=s.name in matrices)
        for key, tensor in zip(named_state.parameter_keys(s.name, own), (_WEIGHT, *own.states), strict=True):
            if not s.length:  # perhaps in no flat tensor of this rank
                named[key] = NamedShard(shape, start=s.start, values=flats[s.flat][_WEIGHT].new_empty(0), box=box)
                continue
            values = flats[s.flat][tensor].view(-1).narrow(0, s.offset, s.length)
            named[key] = NamedShard(shape, start=s.start, values=values, box=box)
    if kind.counts_steps:
        state = wrapped(optimizer).state.get(flat_tensors(optimizer)[-1], {})
        named[named_state.OPTIMIZER_STEP] = step_counter(state)
    return LocalState(named, copies)


@torch.no_grad()
def restore_local_state(optimizer: Any, local_state: LocalState, kind: OptimizerKind) -> None:
    """Restores a loaded state: offloaded tensors, step counters and the model's own weights. Collective."""
    counter = local_state.named.get(named_state.OPTIMIZER_STEP)
    for index, flat in enumerate(flat_tensors(optimizer)):
        with swapped_in(optimizer, index, write=True):
            state = ensure_state(wrapped(optimizer), flat, _kind_of(optimizer, index, kind))
            for tensor, values in local_state.copies.get(index, {}).items():
                (flat.data if tensor == _WEIGHT else state[tensor]).copy_(values)
            set_step_counter(state, counter)  # not through param_groups: stage 3 keeps them empty between steps
            if _is_stage3(optimizer):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
    refresh_model_weights(optimizer)


def reset_optimizer_state(optimizer: Any) -> None:
    """Undoes the dummy step with which some of DeepSpeed's optimizers allocate their state.

    The dummy step leaves AdamW's step counter at 1, which would scale the first real update by 0.74 (bias correction).
    """
    for state in wrapped(optimizer).state.values():
        for value in state.values():
            if torch.is_tensor(value):
                value.zero_()


def _weight_and_states(optimizer: Any, index: int, kind: OptimizerKind) -> dict[str, Tensor]:
    """Returns a flat tensor and its states; copies if they are offloaded to a disk."""
    flat, kind = flat_tensors(optimizer)[index], _kind_of(optimizer, index, kind)
    if not is_swapped(optimizer, index):
        state = ensure_state(wrapped(optimizer), flat, kind)
        return {_WEIGHT: flat.data, **{name: state[name] for name in kind.states}}
    with swapped_in(optimizer, index, write=False):
        state = wrapped(optimizer).state.get(flat, {})
        weight = flat.data.clone()
        states = {s: state[s].clone() if s in state else torch.zeros_like(weight) for s in kind.states}
    return {_WEIGHT: weight, **states}


def _kind_of(optimizer: Any, index: int, kind: OptimizerKind) -> OptimizerKind:
    """Returns the optimizer kind of a flat tensor, from its parameter group."""
    groups = wrapped(optimizer).param_groups
    if isinstance(optimizer, ReplicatedOptimizer):
        flat = flat_tensors(optimizer)[index]
        [group] = [each for each in groups if any(p is flat for p in each["params"])]
    else:
        group = groups[optimizer.sub_group_to_group_id[index] if _is_stage3(optimizer) else index]
    return kind_of_group(kind, group)


def held_shards(
    optimizer: Any, local_model: LocalModel, forms: Mapping[str, Form]
) -> list[tuple[Tensor, list[HeldShard[Form]]]]:
    """Lists this rank's shards of some parameters by flat tensor; all data ranks have the same tensors in one order.

    Args:
        optimizer: the engine's `optimizer`.
        local_model: this rank's part of the model.
        forms: parameter name -> its form, e.g. its matrices; may include parameters of other ranks.
    """
    flats = flat_tensors(optimizer)
    held: list[tuple[Tensor, list[HeldShard[Form]]]] = [(flat, []) for flat in flats]
    for s in flat_slices(optimizer, local_model.decoder.parameters_by_name()):
        if s.length and s.name in forms:
            shard = HeldShard(s.name, forms[s.name], local_model.box(s.name), s.start, s.offset, s.length)
            held[s.flat][1].append(shard)
    return held


def refresh_model_weights(optimizer: Any) -> None:
    """Updates the model's own weights from the fp32 master weights of all ranks."""
    if isinstance(optimizer, ReplicatedOptimizer):
        optimizer.refresh_weights()
    elif not _is_stage3(optimizer):
        optimizer.update_lp_params()
    else:
        # parameters that are still gathered (after an evaluation, or persistent ones) are outdated copies
        optimizer.empty_partition_cache()
        optimizer.invalidate_secondary_tensor()  # hpZ: the copies within a node have the old weights
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def replicas(
    optimizer: Any, local_model: LocalModel, mesh: Mesh | None, tied_group: dist.ProcessGroup | None
) -> Iterator[Replica]:
    """Yields this rank's weights that other ranks have too: fp32 at stage 0, in the model's dtype at stages 1 to 3.

    At stage 3 data ranks have no replicas; partitions offloaded to a disk are omitted.

    Args:
        optimizer: the engine's `optimizer`.
        local_model: this rank's part of the model.
        mesh: this rank's coordinates and groups; None for one process.
        tied_group: the two ranks with copies of tied weights; None if this rank has no copy.
    """
    if mesh is None:
        return
    data_group, tp_group = mesh.group("data"), mesh.group("tp")
    same_experts = mesh.expert_groups()["edp"] if local_model.experts and mesh.topology.edp > 1 else None
    for name, weight in sorted(local_model.decoder.parameters_by_name().items()):  # in the order of all stages
        values, replica_group = weight.data, same_experts if name in local_model.experts else data_group
        if isinstance(optimizer, ReplicatedOptimizer):
            values = optimizer.masters[name].data
        elif _is_stage3(optimizer):
            part: Any = weight.ds_tensor  # type: ignore[attr-defined]
            if part.status != PartitionedParamStatus.AVAILABLE:
                continue
            values, replica_group = part.data, None
        unsharded, tied = local_model.box(name) is None, name in local_model.tied
        groups = (replica_group, tp_group if unsharded else None, tied_group if tied else None)
        yield from (Replica(name, values, group) for group in groups if group is not None)


def wrapped(optimizer: Any) -> Any:
    """Returns the wrapped optimizer, which has the states."""
    return optimizer.updating if isinstance(optimizer, ReplicatedOptimizer) else optimizer.optimizer


def _is_stage3(optimizer: Any) -> bool:
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def flat_tensors(optimizer: Any) -> list[Tensor]:
    """Returns this rank's flat fp32 tensors: per parameter (stage 0), parameter group (1, 2) or sub-group (3)."""
    if isinstance(optimizer, ReplicatedOptimizer):
        return list(optimizer.masters.values())
    names = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
    flats: list[Tensor] = next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))
    return flats


def flat_slices(optimizer: Any, named: dict[str, nn.Parameter]) -> Iterator[FlatSlice]:
    """Yields this rank's slice of every parameter.

    Args:
        optimizer: DeepSpeed's optimizer.
        named: the parameters by Hugging Face name.
    """
    for index, (name, parameter) in enumerate(named.items()):
        if isinstance(optimizer, ReplicatedOptimizer):
            yield FlatSlice(name, 0, index, 0, parameter.numel())
        else:
            yield (_flat_slice_stage3 if _is_stage3(optimizer) else _flat_slice_stage12)(optimizer, name, parameter)


def _flat_slice_stage12(_optimizer: Any, name: str, parameter: nn.Parameter) -> FlatSlice:
    mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return FlatSlice(name, 0, 0, 0, 0)
    inside, outside = mapping.lp_fragment_address, mapping.hp_fragment_address
    return FlatSlice(name, inside.start, mapping.param_group_index, outside.start, inside.numel)


def _flat_slice_stage3(optimizer: Any, name: str, parameter: nn.Parameter) -> FlatSlice:
    group, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = optimizer._get_param_partition_rank(parameter) * padded
    numel: int = parameter.ds_numel  # type: ignore[attr-defined]
    # padding that makes partitions equal may extend the last rank's partition past the end of the parameter
    length = max(0, min(padded, numel - start))
    return FlatSlice(name, min(start, numel), group, offset, length)
