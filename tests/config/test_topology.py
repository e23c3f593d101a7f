"""Topology: rank <-> coordinates is a bijection, and neighbors share a tensor-parallel group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.topology import AXES, Topology

SIZES = st.integers(1, 4)


@given(pp=SIZES, dp=SIZES, cp=SIZES, tp=SIZES)
def test_rank_and_coordinates_are_inverse(pp: int, dp: int, cp: int, tp: int) -> None:
    topology = Topology(pp=pp, dp=dp, cp=cp, tp=tp)
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert [topology.rank(**place) for place in places] == list(range(topology.world_size))


@given(pp=SIZES, dp=SIZES, cp=SIZES, tp=SIZES, axis=st.sampled_from(AXES))
def test_the_groups_of_an_axis_partition_the_ranks(pp: int, dp: int, cp: int, tp: int, axis: str) -> None:
    topology = Topology(pp=pp, dp=dp, cp=cp, tp=tp)
    groups = {tuple(topology.group(rank, axis)) for rank in range(topology.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))


def test_tensor_parallel_ranks_are_neighbors_and_stages_lie_furthest_apart() -> None:
    topology = Topology(pp=2, dp=2, tp=2)
    assert topology.group(0, "tp") == [0, 1]
    assert topology.group(0, "dp") == [0, 2]
    assert topology.group(0, "pp") == [0, 4]
