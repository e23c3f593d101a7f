"""Write plan: which rank writes which shards, computed once by the planners of torch.distributed.checkpoint.

A layout does not change during a run, so neither does the plan. Replicas, which several ranks have, are divided among
these ranks, and each rank copies and writes only its own share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from headrace.base.errors import CheckpointError
from pipeline.checkpoint.shards import NamedShard, SavePlanner

T = TypeVar("T")
State = Mapping[str, NamedShard | Tensor]
"""The state dict of a rank: its shards, under the keys of `named_state`."""


@dataclass(frozen=True)
class WritePlan:
    """What one rank writes.

    Attributes:
        rank: of this process.
        items: the shards, as torch.distributed.checkpoint describes them.
        layout: key -> layout of this rank's part of the state that the plan was made for.
        metadata: of the whole checkpoint; on rank 0 only.
    """

    rank: int
    items: SavePlan
    layout: dict[str, Any]
    metadata: Metadata | None

    def matches(self, state: State) -> bool:
        """Whether a state has the layout that the plan was made for."""
        return _layout(state) == self.layout

    def value_lookup(self, state: State) -> Callable[[WriteItem], Tensor]:
        """A function that returns the values of an item of the plan from a state."""
        planner = _planner(state, coordinator=self.rank == 0)
        return lambda item: planner.lookup_object(item.index).detach()


def make_write_plan(state: State) -> WritePlan:
    """Divides the shards of a state among the ranks. Collective.

    Raises:
        CheckpointError: the shards of all ranks overlap, or do not cover a tensor.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    planner = _planner(state, coordinator=rank == 0)
    local_plan = planner.create_local_plan()
    plans: list[Any] = [local_plan] * ranks if rank == 0 else []
    if ranks > 1:
        dist.gather_object(local_plan, plans if rank == 0 else None)
    metadata: Metadata | None = None
    outcomes: list[Any] = [None] * ranks
    if rank == 0:
        try:
            plans, metadata = planner.create_global_plan(plans)
            outcomes = [dataclasses.replace(plan, planner_data=None) for plan in plans]
        except ValueError as error:
            outcomes = [str(error)] * ranks
    received: list[Any] = outcomes[:1]
    if ranks > 1:
        dist.scatter_object_list(received, outcomes if rank == 0 else None)
    if isinstance(received[0], str):
        raise CheckpointError(f"the shards of all ranks do not make up a complete state: {received[0]}")
    return WritePlan(rank, received[0], _layout(state), metadata)


def _planner(state: State, *, coordinator: bool) -> SavePlanner:
    planner = SavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=coordinator)
    return planner


def _layout(state: State) -> dict[str, Any]:
    return {
        key: value.layout if isinstance(value, NamedShard) else (tuple(value.shape), value.dtype)
        for key, value in state.items()
    }
