"""Machines are found by name, by file and by torch's name of a device, or refused; ranks on a node share one."""

from __future__ import annotations

import json
import operator
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError
from pipeline.runtime.machines import known
from pipeline.runtime.machines.known import known_machines, load_machine, machine_of_device
from pipeline.runtime.machines.machine import BusySection, HostSection, LinkSection, Machine
from pipeline.runtime.machines.ranks import with_ranks


@pytest.mark.parametrize("name", known_machines())
def test_every_machine_has_rates_that_do_not_exceed_its_peaks(name: str) -> None:
    machine = load_machine(name)
    for dtype, peak in machine.peak_flops.items():
        low, typical, high = machine.rate(dtype)
        assert 0 < low < typical < high < peak, dtype


_NO_NUMBERS = {"name", "devices", "devices_per_node", "gpu", "sources", "measured", "scored"}
_SOURCED = {
    "peak_flops": {"peak_flops"},
    "memory": {"memory"},
    "links": {"links.within", "links.between", "links.host", "latency"},
    "efficiency": {"efficiency"},
    "best": {"best"},
    "overhead": {"overhead"},
    "host": {"host"},
    "storage_bytes_per_s": {"storage"},
}
"""Section of numbers -> the sources that it needs."""
_RUNS = "benchmarks/published_runs.json"
"""What ranges are fitted to: the addresses are in the file."""


@pytest.mark.parametrize("name", known_machines())
def test_every_number_of_a_machine_has_an_address_that_was_read_or_was_not_found(name: str) -> None:
    raw = json.loads((Path(known.__file__).parent / f"{name}.json").read_text())
    assert raw.keys() - _NO_NUMBERS <= {*_SOURCED, "compute_capability"}, "a section of numbers that needs a source"
    of_a_gpu = {"compute_capability"} if raw.get("gpu", True) else set()
    of_the_best = set() if "best" in raw else {"best"}
    assert raw["sources"].keys() == set().union(*_SOURCED.values(), of_a_gpu) - of_the_best
    for key, source in raw["sources"].items():
        assert re.search(rf"https://\S+\.\S+|{_RUNS}|not found", source), (key, source)


def test_every_published_run_has_the_address_that_it_was_read_at() -> None:
    runs = json.loads((Path(__file__).parents[3] / _RUNS).read_text())
    assert all(re.match(r"https://\S+\.\S+", source) for source in runs["sources"].values())
    assert {run["source"] for run in runs["runs"]} <= runs["sources"].keys()


def test_the_machines_of_the_field_are_there() -> None:
    assert {"a100", "h100", "h200", "b200", "gb200", "mi300x", "l40s", "rtx4090"} <= set(known_machines())


@pytest.mark.parametrize(
    ("given", "near"),
    [("h10", "h100"), ("NVIDIA H200", "h200"), ("mi300", "mi300x"), ("RTX-4090", "rtx4090"), ("gb20", "gb200")],
)
def test_an_unknown_machine_is_refused_with_the_nearest_and_with_how_to_measure_one(given: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_machine(given)
    assert f"'{near}'" in caught.value.remedy
    assert "--calibrate" in caught.value.remedy


def test_a_file_that_is_not_there_or_no_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_machine(str(tmp_path / "machine.json"))
    raw = load_machine("h100").model_dump(mode="json")
    path = tmp_path / "machine.json"
    for broken, said in (
        ({**raw, "memory": {"bytes": 1e9}}, "bytes_per_s"),
        ({**raw, "speed": 1}, "speed"),
        ({**raw, "efficiency": {**raw["efficiency"], "memory": [0.9, 0.5, 0.7]}}, "efficiency.memory"),
        ({**raw, "peak_flops": {"bf16": 1e12}}, "fp32"),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(ConfigError, match=said):
            load_machine(str(path))
    path.write_text(json.dumps(raw))
    assert load_machine(str(path)) == load_machine("h100")


def test_what_a_machine_lacks_is_computed_in_the_next_wider_dtype() -> None:
    a100 = load_machine("a100")
    assert a100.rate("fp8") == a100.rate("bf16")
    only = a100.model_copy(update={"peak_flops": {"fp32": 1e12}})
    assert only.rate("bf16") == only.rate("fp32")


def test_a_device_is_known_by_the_name_that_torch_gives_it() -> None:
    names = {"NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA GB200": "GB200 NVL72"}
    for device, name in names.items():
        machine = machine_of_device(device)
        assert machine.name == name
    assert machine_of_device("NVIDIA GeForce RTX 4090") == load_machine("rtx4090")
    assert machine_of_device("NVIDIA T4") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("peak_flops", {"bf16": 989.4}), ("memory", {"bytes": 80, "bytes_per_s": 3.35e12})],
)
def test_a_number_in_another_unit_is_refused(tmp_path: Path, key: str, value: dict[str, float]) -> None:
    raw = json.loads((Path(known.__file__).parent / "h100.json").read_text()) | {key: value}
    (tmp_path / "mine.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"no device has less than .* e.g. 989.4e12"):
        load_machine(str(tmp_path / "mine.json"))


@pytest.mark.parametrize(("at", "key"), [(("efficiency", "products"), "bf16"), (("overhead",), "fragmentation")])
def test_a_share_in_percent_is_refused(at: tuple[str, ...], key: str, tmp_path: Path) -> None:
    raw = json.loads((Path(known.__file__).parent / "h100.json").read_text())
    reduce(operator.getitem, at, raw)[key] = [30, 36, 40]
    (tmp_path / "mine.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"36 percent is 0\.36"):
        load_machine(str(tmp_path / "mine.json"))


def cpu(**efficiency: Any) -> Machine:
    """Four cores that have half the memory bandwidth and 80 % of the products' rate when all compute."""
    shipped = load_machine("cpu")
    busy = BusySection(products=0.8, memory=0.5)
    return shipped.model_copy(
        update={
            "devices_per_node": 4,
            "efficiency": shipped.efficiency.model_copy(update={"all_busy": busy, **efficiency}),
            "host": HostSection(forward_s=1e-3, backward_s=2e-3, memory_bytes=1e12),
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
    assert after.host == HostSection(forward_s=2e-3, backward_s=4e-3, memory_bytes=1e12)


@pytest.mark.parametrize(("ranks", "rate"), [(1, 32e9), (2, 32e9), (4, 93e9 / 4), (8, 93e9 / 4)])
def test_cards_on_a_host_bridge_share_its_rate(ranks: int, rate: float) -> None:
    machine = with_ranks(load_machine("l40s"), ranks)
    assert machine.links.within.bytes_per_s == pytest.approx(rate)
    assert with_ranks(machine, ranks).links == machine.links
    assert machine.host.memory_bytes == load_machine("l40s").host.memory_bytes


def test_no_two_ranks_share_a_gpu() -> None:
    machine = load_machine("h100")
    assert with_ranks(machine, 64) == machine
