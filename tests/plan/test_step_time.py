"""Closed forms of collectives and of a pipeline's bubble, and the rates that they are given."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest

from pipeline.plan.predict.closed_form_step import CLOSED
from pipeline.plan.predict.closed_form_times import collective_seconds, pipeline_step
from pipeline.plan.predict.collectives import RankGroup, collective_s, fastest, group_of, send_s
from pipeline.plan.predict.links import Link, LinkTopology
from pipeline.plan.predict.plan import run_rates, typical_time
from pipeline.plan.predict.planned_run import open_run
from pipeline.plan.predict.rates import TypicalProduct, rates_of
from pipeline.plan.predict.step_time import ADAM_HOST_BYTES, HOST_MEMORY_SHARE
from pipeline.plan.predict.work import work_of
from pipeline.runtime.machines.known import load_machine
from pipeline.runtime.machines.machine import HostSection, Machine, MeasuredProduct, MeasuredSection, Operation
from tests.conftest import ROOT

NODES = LinkTopology(8, Link(450e9, 0.0), Link(50e9, 0.0))
# 450 GB/s and 3 us within nodes of 8, 50 GB/s and 10 us per device between them
H100 = LinkTopology(8, Link(450e9, 3e-6), Link(50e9, 10e-6))
GIB = 2.0**30


def test_a_ring_sends_what_a_rank_lacks_and_an_all_reduce_twice_that() -> None:
    ranks = range(8)
    assert collective_seconds("all_gather", 8e9, ranks, NODES) == pytest.approx(7e9 / 450e9)
    assert collective_seconds("all_reduce", 8e9, ranks, NODES) == pytest.approx(14e9 / 450e9)
    assert collective_seconds("send", 8e9, ranks[:2], NODES) == pytest.approx(8e9 / 450e9)
    assert collective_seconds("all_gather", 8e9, ranks[:1], NODES) == 0


def test_a_group_that_spans_nodes_has_the_adapters_of_its_ranks_in_a_node() -> None:
    one_each = collective_seconds("all_gather", 8e9, range(0, 64, 8), NODES)
    assert one_each == pytest.approx(7e9 / 50e9)
    whole_nodes = collective_seconds("all_gather", 16e9, range(16), NODES)
    assert whole_nodes == pytest.approx(15e9 / 400e9)


def test_each_collective_has_the_latency_of_a_tree() -> None:
    slow = LinkTopology(8, Link(450e9, 1e-3), Link(50e9, 1e-3))
    assert collective_seconds("all_reduce", 0.0, range(8), slow, count=10) == pytest.approx(10 * 3 * 1e-3)


def test_virtual_stages_and_zero_bubble_shorten_the_bubble() -> None:
    plain = pipeline_step("1f1b", 4, 8, 1.0, 2.0, 0.0)
    assert (plain.seconds, plain.bubble) == (8 * 3 + 9, 9)
    assert pipeline_step("gpipe", 4, 8, 1.0, 2.0, 0.0) == plain
    assert pipeline_step("interleaved_1f1b", 4, 8, 1.0, 2.0, 0.0, virtual_stages=2).bubble == 4.5
    assert pipeline_step("zero_bubble", 4, 8, 1.0, 2.0, 0.0, virtual_stages=2).bubble == pytest.approx(1.5)
    assert pipeline_step("1f1b", 1, 8, 1.0, 2.0, 5.0).bubble == 0


def test_a_calibrated_machine_has_the_rate_of_the_measured_product_nearest_to_the_run_s() -> None:
    products = tuple(
        MeasuredProduct(dtype="bf16", m=m, k=m, n=m, flops_per_s=(speed, 2 * speed, 3 * speed))
        for m, speed in ((256, 1e12), (4096, 1e14))
    )
    measured = MeasuredSection(
        date="2026-01-01",
        device="d",
        torch="2",
        products=products,
        attention_flops_per_s=(1.0, 2.0, 3.0),
        copy_bytes_per_s=(1.0, 2.0, 3.0),
        host_bytes_per_s=(1.0, 2.0, 3.0),
    )
    machine: Machine = load_machine("h100").model_copy(update={"measured": measured})
    assert rates_of(machine, "bf16", 1, product=TypicalProduct(300, 300, 200)).products == 2e12
    assert rates_of(machine, "bf16", 0, product=TypicalProduct(8192, 8192, 8192)).products == 1e14
    assert rates_of(machine, "bf16", 2, product=TypicalProduct(8192, 8192, 8192)).attention == 3.0
    # no product was measured in fp8: the share of the peak counts
    assert rates_of(machine, "fp8", 1, product=TypicalProduct(300, 300, 200)).products == machine.rate("fp8")[1]


def test_attention_and_the_head_of_an_fp8_run_have_the_rate_of_bf16() -> None:
    machine = load_machine("h100")
    half, quarter = (rates_of(machine, dtype, 1) for dtype in ("bf16", "fp8"))
    assert quarter.products > half.products
    assert (quarter.attention, quarter.head) == (half.attention, half.head)
    assert half.head == half.products
    assert half.attention == machine.efficiency.attention[1] * machine.peak_flops["bf16"]


@pytest.mark.parametrize(("ranks", "share"), [(2, 1 / 7), (4, 3 / 7), (8, 1.0), (16, 1.0)])
def test_devices_linked_one_to_one_have_as_many_links_as_others_in_their_group(ranks: int, share: float) -> None:
    switch = LinkTopology(8, Link(448e9, 0.0), Link(400e9, 0.0))
    pairs = replace(switch, within_links=7)
    group, numbers = group_of(pairs, size=ranks), range(ranks)
    for kind in ("all_reduce", "all_gather"):
        by_switch, by_pairs = (collective_s(kind, "ring", group, each, size=1e9) for each in (switch, pairs))
        assert by_pairs == pytest.approx(by_switch / share)
        by_switch, by_pairs = (collective_seconds(kind, 1e9, numbers, each) for each in (switch, pairs))
        assert by_pairs == pytest.approx(by_switch / share)
    assert send_s(pairs, size=1e9, same_node=True) == pytest.approx(7 * send_s(switch, size=1e9, same_node=True))


@pytest.mark.parametrize(("ranks", "kind", "rate"), [
    (range(4), "all_reduce", 20e9),  # on one bridge
    (range(8), "all_gather", 10e9),  # a ring crosses once
    (range(0, 8, 2), "all_gather", 5e9),  # two groups cross at the same time
    (range(0, 8, 4), "all_gather", 2.5e9),
    (range(8), "all_to_all", 5e9),  # four devices send half of their rows across: twice the bytes of a ring
])  # fmt: skip
def test_groups_that_cross_from_one_host_bridge_to_the_next_share_the_way(
    ranks: range, kind: Operation, rate: float
) -> None:
    cards = LinkTopology(8, Link(20e9, 0.0), Link(400e9, 0.0), bridge_devices=4, between_bridges=10e9)
    switch = LinkTopology(8, Link(rate, 0.0), Link(400e9, 0.0))
    group = group_of(cards, size=len(ranks), stride=ranks.step)
    slow, expected = (collective_s(kind, "ring", group, each, size=1e9) for each in (cards, switch))
    assert slow == pytest.approx(expected)
    slow, expected = (collective_seconds(kind, 1e9, ranks, each) for each in (cards, switch))
    assert slow == pytest.approx(expected)


def test_a_kind_of_collective_that_was_measured_has_its_own_link() -> None:
    own = LinkTopology(8, NODES.within, NODES.between, {"reduce_scatter": Link(1e9, 0.0)})
    for kind in ("all_gather", "all_reduce", "send"):
        assert collective_seconds(kind, 8e9, range(8), own) == collective_seconds(kind, 8e9, range(8), NODES)
    assert collective_seconds("reduce_scatter", 8e9, range(8), own) == pytest.approx(7.0)
    far = collective_seconds("all_gather", 8e9, range(0, 64, 8), own)
    assert far == collective_seconds("all_gather", 8e9, range(0, 64, 8), NODES)
    ring = collective_s("reduce_scatter", "ring", RankGroup(8, 1), own, size=8e9)
    assert ring == pytest.approx(7.0)


def test_an_engine_that_waits_for_its_collectives_hides_nothing_of_them() -> None:
    machine = load_machine("h100")
    assert [rates_of(machine, "bf16", end).overlap for end in (0, 1, 2)] == [*machine.efficiency.overlap]
    assert rates_of(machine, "bf16", 2, hidden=False).overlap == 0


def test_the_host_s_time_for_a_layer_counts_on_a_cpu() -> None:
    host = HostSection(forward_s=1e-3, backward_s=2e-3)
    for name, expected in (("cpu", (1e-3, 2e-3)), ("h100", (0.0, 0.0))):
        rates = rates_of(load_machine(name).model_copy(update={"host": host}), "fp32", 1)
        assert (rates.layer_forward_s, rates.layer_backward_s) == expected


@pytest.mark.parametrize(("stage", "count", "sums"), [(3, 8, 2 * 8 * 4), (3, 1, 2 * 4), (2, 8, 15 * 2), (2, 1, 0)])
def test_an_offloaded_optimizer_moves_the_sums_of_gradients_of_each_micro_batch(
    stage: int, count: int, sums: int
) -> None:
    """Bytes per parameter on one device, beside the gradients (4) and weights (2) of the update."""
    batch = {"train_batch_size": count, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": count}
    zero = {"zero_optimization.stage": stage, "zero_optimization.offload_optimizer.device": "cpu"}
    sets = [f"{key}={value}" for key, value in {"engine": "deepspeed", **zero, **batch}.items()]
    config = str(ROOT / "ds_configs/llama_8b_8gpu.json")
    planned = open_run(config, sets, load_machine("h200"), nodes=None, processes=1)
    rates = run_rates(planned.run, planned.costs, planned.machine, 1)
    parameters = work_of(planned.run, planned.costs, 0).layout.rank.parameters
    updated = parameters * ADAM_HOST_BYTES / (HOST_MEMORY_SHARE * rates.host.bandwidth)
    found = typical_time(planned.run, planned.costs, planned.machine, model=CLOSED).offload
    assert found == pytest.approx(rates.host.seconds(parameters * (6 + sums)) + updated)


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
    assert apart == RankGroup(16, 16, 8)
    expected = 15 * 10e-6 + 15 / 16 * GIB / 50e9
    assert collective_s("all_gather", "ring", apart, H100, size=GIB) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("size", "stride", "nodes"), [(1, 1, 1), (8, 1, 1), (9, 1, 2), (4, 2, 1), (4, 4, 2), (3, 4, 2)]
)
def test_the_nodes_of_a_group(size: int, stride: int, nodes: int) -> None:
    assert group_of(H100, size=size, stride=stride) == RankGroup(size, nodes, stride)


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
