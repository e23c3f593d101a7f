"""A machine as several ranks on a node find it."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.runtime.machines.known import load_machine
from pipeline.runtime.machines.machine import BusySection, HostSection, LinkSection, Machine
from pipeline.runtime.machines.ranks import with_ranks


def cpu(**efficiency: Any) -> Machine:
    """Four cores that have half the memory bandwidth and 80 % of the products' rate when all compute."""
    shipped = load_machine("cpu")
    busy = BusySection(products=0.8, memory=0.5)
    return shipped.model_copy(
        update={
            "devices_per_node": 4,
            "efficiency": shipped.efficiency.model_copy(update={"all_busy": busy, **efficiency}),
            "host": HostSection(forward_s=1e-3, backward_s=2e-3),
            "links": shipped.links.model_copy(
                update={"operations": {"all_gather": LinkSection(bytes_per_s=1e9, latency_s=1e-3)}}
            ),
        }
    )


def test_a_rank_alone_has_the_whole_device() -> None:
    assert with_ranks(cpu(), 1) == cpu()


@pytest.mark.parametrize(("ranks", "products", "memory"), [(2, 1 - 0.2 / 3, 1 - 0.5 / 3), (4, 0.8, 0.5)])
def test_rates_fall_with_the_devices_that_compute(ranks: int, products: float, memory: float) -> None:
    before, after = cpu(), with_ranks(cpu(), ranks)
    assert after.rate("fp32") == pytest.approx([each * products for each in before.rate("fp32")])
    assert after.efficiency.memory == pytest.approx([each * memory for each in before.efficiency.memory])
    assert (after.links, after.memory, after.host, after.devices_per_node) == (
        before.links,
        before.memory,
        before.host,
        4,
    )


def test_ranks_that_share_cores_share_products_memory_and_links_and_stay_on_one_node() -> None:
    before, after = cpu(), with_ranks(cpu(), 8)
    assert after.devices_per_node == 8
    assert after.rate("fp32") == pytest.approx([each * 0.8 / 2 for each in before.rate("fp32")])
    assert after.peak_flops["fp32"] == before.peak_flops["fp32"] / 2
    assert after.memory.bytes == before.memory.bytes / 2
    assert after.efficiency.memory == pytest.approx([each * 0.5 / 2 for each in before.efficiency.memory])
    own = after.links.operations["all_gather"]
    assert (own.bytes_per_s, own.latency_s) == (0.5e9, 2e-3)
    assert after.host == HostSection(forward_s=2e-3, backward_s=4e-3)


def test_no_two_ranks_share_a_gpu() -> None:
    machine = load_machine("h100")
    assert with_ranks(machine, 64) == machine
