"""Collectives by formula: limits that have to hold, and hand-computed cases."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from pipeline.plan.predict.collectives import RankGroup, collective_s, fastest, group_of, send_s
from pipeline.plan.predict.links import Link, LinkTopology
from pipeline.runtime.machines.machine import Operation

# 450 GB/s and 3 us within nodes of 8, 50 GB/s and 10 us per device between them
H100 = LinkTopology(8, Link(450e9, 3e-6), Link(50e9, 10e-6))
GIB = 2.0**30


def test_a_ring_in_a_node_by_hand() -> None:
    group = group_of(H100, size=8)
    assert group == RankGroup(8, 1)
    half = 7 * (3e-6 + GIB / 8 / 450e9)
    assert collective_s("all_gather", "ring", group, H100, size=GIB) == pytest.approx(half)
    assert collective_s("reduce_scatter", "ring", group, H100, size=GIB) == pytest.approx(half)
    assert collective_s("all_reduce", "ring", group, H100, size=GIB) == pytest.approx(2 * half)


def test_a_ring_over_nodes_uses_the_network_of_all_devices_of_a_node() -> None:
    group = group_of(H100, size=16)
    assert group == RankGroup(16, 2)
    # 8 x 50 GB/s are less than 450; a chunk crosses the network once in 15 hops
    expected = 14 * 3e-6 + 10e-6 + 15 / 16 * GIB / 400e9
    assert collective_s("all_gather", "ring", group, H100, size=GIB) == pytest.approx(expected)
    # one device of each node: its own share alone
    apart = group_of(H100, size=16, stride=8)
    assert apart == RankGroup(16, 16)
    expected = 15 * 10e-6 + 15 / 16 * GIB / 50e9
    assert collective_s("all_gather", "ring", apart, H100, size=GIB) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("size", "stride", "nodes"), [(1, 1, 1), (8, 1, 1), (9, 1, 2), (4, 2, 1), (4, 4, 2), (3, 4, 2)]
)
def test_the_nodes_of_a_group(size: int, stride: int, nodes: int) -> None:
    assert group_of(H100, size=size, stride=stride) == RankGroup(size, nodes)


@pytest.mark.parametrize("operation", get_args(Operation))
@pytest.mark.parametrize("ranks", [2, 8, 16, 512])
def test_what_holds_of_every_collective(operation: Operation, ranks: int) -> None:
    group = group_of(H100, size=ranks)
    times = [fastest(operation, group, H100, size=size)[1] for size in (0.0, 1e3, 1e6, 1e9, 1e12)]
    assert times == sorted(times)
    assert fastest(operation, RankGroup(1, 1), H100, size=1e9)[1] == 0.0
    # every rank receives at least what it does not have, at its own full bandwidth
    assert times[-1] > 1e12 * (ranks - 1) / ranks / H100.within.bandwidth


def test_small_messages_over_many_nodes_go_by_tree_and_large_ones_by_ring() -> None:
    group = group_of(H100, size=1024)
    assert fastest("all_reduce", group, H100, size=1e3)[0] == "tree"
    assert fastest("all_reduce", group_of(H100, size=16), H100, size=10 * GIB)[0] == "ring"
    tree = collective_s("all_reduce", "tree", group, H100, size=0.0)
    assert tree == pytest.approx(2 * (7 * 3e-6 + math.log2(128) * 10e-6))
    ring = collective_s("all_reduce", "ring", group, H100, size=0.0)
    assert ring == pytest.approx(2 * (896 * 3e-6 + 127 * 10e-6))


def test_hierarchical_all_reduce_sends_a_share_between_nodes() -> None:
    group = group_of(H100, size=32)
    within, between = 7 * (3e-6 + GIB / 8 / 450e9), 3 * (10e-6 + GIB / 8 / 4 / 50e9)
    found = collective_s("all_reduce", "hierarchical", group, H100, size=GIB)
    assert found == pytest.approx(2 * (within + between))


def test_all_to_all_pairwise_by_hand() -> None:
    found = collective_s("all_to_all", "ring", group_of(H100, size=16), H100, size=16e6)
    assert found == pytest.approx(7 * (3e-6 + 1e6 / 450e9) + 8 * (10e-6 + 1e6 / 50e9))


def test_an_algorithm_that_an_operation_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="all_gather has no algorithm tree"):
        collective_s("all_gather", "tree", RankGroup(8, 1), H100, size=1.0)


def test_a_message() -> None:
    assert send_s(H100, size=50e9, same_node=False) == pytest.approx(1.00001)
    assert send_s(H100, size=450e9, same_node=True) == pytest.approx(1.000003)
