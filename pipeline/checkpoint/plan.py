"""Who writes what of a state that many ranks hold: agreed upon once, by the planners of torch.distributed.checkpoint.

A layout does not change while a run lasts, so neither does the plan. What several ranks hold (replicas) is dealt out
among them, and each copies and writes its own share only.
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
"""What a rank holds, under the keys of `named_state`."""


@dataclass(frozen=True)
class WritePlan:
    """What one rank writes.

    Attributes:
        rank: of this process.
        items: the pieces, as torch.distributed.checkpoint describes them.
        held: key -> pieces of everything this rank holds: what the plan was made for.
        metadata: of the whole checkpoint; on rank 0 only.
    """

    rank: int
    items: SavePlan
    held: dict[str, Any]
    metadata: Metadata | None

    def fits(self, state: State) -> bool:
        """Whether a state has the pieces the plan was made for."""
        return _pieces(state) == self.held

    def source(self, state: State) -> Callable[[WriteItem], Tensor]:
        """Finds the values of a piece in a state."""
        planner = _planner(state, coordinator=self.rank == 0)
        return lambda item: planner.lookup_object(item.index).detach()


def make_write_plan(state: State) -> WritePlan:
    """Deals the pieces of a state out among the ranks. Collective.

    Raises:
        CheckpointError: the pieces of all ranks overlap, or leave a part of a tensor out.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    planner = _planner(state, coordinator=rank == 0)
    own = planner.create_local_plan()
    plans: list[Any] = [own] * ranks if rank == 0 else []
    if ranks > 1:
        dist.gather_object(own, plans if rank == 0 else None)
    metadata: Metadata | None = None
    outcome: list[Any] = [None] * ranks
    if rank == 0:
        try:
            plans, metadata = planner.create_global_plan(plans)
            outcome = [dataclasses.replace(plan, planner_data=None) for plan in plans]
        except ValueError as error:
            outcome = [str(error)] * ranks
    got: list[Any] = outcome[:1]
    if ranks > 1:
        dist.scatter_object_list(got, outcome if rank == 0 else None)
    if isinstance(got[0], str):
        raise CheckpointError(f"the state of the ranks does not make a whole: {got[0]}")
    return WritePlan(rank, got[0], _pieces(state), metadata)


def _planner(state: State, *, coordinator: bool) -> SavePlanner:
    planner = SavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=coordinator)
    return planner


def _pieces(state: State) -> dict[str, Any]:
    return {
        key: held.boxes if isinstance(held, NamedShard) else (tuple(held.shape), held.dtype)
        for key, held in state.items()
    }
