"""`headrace plan --calibrate`: the present machine measured, as a file that a plan reads."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from foundation.errors import ConfigError, TrainingError
from pipeline.plan.calibration import calibrate, measure
from pipeline.plan.calibration.calibrate import calibrate_command
from pipeline.plan.calibration.fit_links import link_of, links_of
from pipeline.plan.calibration.measure_links import SIZES, between_ranks
from pipeline.plan.predict.collectives import RankGroup, collective_s
from pipeline.plan.predict.links import Link, LinkTopology
from pipeline.plan.predict.plan import make_plan
from pipeline.plan.predict.planned_run import open_run
from pipeline.runtime.machines.known import load_machine
from pipeline.runtime.machines.machine import OVERLAP, MeasuredCollective, Operation
from pipeline.runtime.machines.ranks import with_ranks
from tests.conftest import tiny_config, write_config


@pytest.mark.sweep
def test_this_machine_is_measured_and_plans_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "CPU_SHAPES", ((128, 64, 128), (256, 128, 256)))
    monkeypatch.setattr(measure, "_ELEMENTS", {"cpu": 1 << 16})
    monkeypatch.setattr(calibrate, "_devices", lambda: 2)
    path = tmp_path / "machine.json"
    assert calibrate_command(str(path)) == 0
    machine = load_machine(str(path))
    measured = machine.measured
    assert {each.dtype for each in measured.products} == {"bf16", "fp32"}
    kinds = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert {(row.kind, row.bytes) for row in measured.collectives} == {(kind, size) for kind in kinds for size in SIZES}
    assert set(machine.links.operations) == kinds - {"all_reduce"}
    assert 0 <= machine.efficiency.overlap[0] <= machine.efficiency.overlap[2] <= 1
    assert machine.host.forward_s > 0
    for each in measured.products:
        assert 0 < each.flops_per_s[0] <= each.flops_per_s[1] <= each.flops_per_s[2] <= machine.peak_flops[each.dtype]
    assert "all-reduce" in capsys.readouterr().out
    config = write_config(tmp_path / "c.json", tiny_config(tmp_path / "no-tokens", tmp_path / "run", engine="torch"))
    assert not machine.gpu
    planned = open_run(str(config), (), machine, nodes=None, processes=2)
    assert planned.run.config.compile.enabled is False
    plan = make_plan(planned.run, planned.costs, machine)
    assert 0 < plan.step_s.low <= plan.step_s.typical <= plan.step_s.high


def test_a_device_that_fails_is_told_at_once_though_the_first_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "python"
    command.write_text('#!/bin/sh\n[ "$3" = 1 ] || exec sleep 600\necho no such device >&2\nexit 1\n')
    command.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(command))
    with pytest.raises(TrainingError, match="failed: no such device"):
        between_ranks(ranks=2)


def test_the_range_of_a_measurement_has_what_was_waited() -> None:
    least, median, most = measure.seconds_of(lambda: time.sleep(0.01), torch.device("cpu"), repeats=3, least_s=0.0)
    assert 0.01 <= least <= median <= most
    assert measure.rates(1.0, (1.0, 2.0, 4.0)) == (0.25, 0.5, 1.0)


def rows_of(kind: Operation, link: Link, *, ranks: int, spread: float = 1.0) -> list[MeasuredCollective]:
    """What is measured where the plan's formula holds; most seconds are `spread` times the others."""
    found = []
    for size in (1, 1 << 20, 1 << 26):
        seconds = collective_s(kind, "ring", RankGroup(ranks, 1), LinkTopology(ranks, link, link), size=size)
        ends = (seconds, seconds, spread * seconds)
        found.append(MeasuredCollective(kind=kind, axis="within", ranks=ranks, bytes=size, seconds=ends))
    return found


def test_links_explain_the_collectives_that_they_come_from_kind_by_kind() -> None:
    rows = rows_of("all_reduce", Link(1e9, 1e-4), ranks=4, spread=2) + rows_of(
        "reduce_scatter", Link(2e8, 1e-3), ranks=4
    )
    within, operations, shares = links_of(rows)
    assert within == {"bytes_per_s": pytest.approx(1e9), "latency_s": pytest.approx(1e-4)}
    assert operations == {"reduce_scatter": {"bytes_per_s": pytest.approx(2e8), "latency_s": pytest.approx(1e-3)}}
    assert shares == pytest.approx([0.5, 1.0, 1.0])


def test_a_latency_that_noise_makes_negative_leaves_the_bandwidth_of_the_largest() -> None:
    rows = [
        MeasuredCollective(axis="within", ranks=2, bytes=size, seconds=(seconds,) * 3)
        for size, seconds in ((1 << 20, 1e-4), (1 << 24, 3.2e-3))
    ]
    assert link_of(rows).latency_s > 0
    assert link_of(rows).bandwidth == pytest.approx((1 << 24) / 3.2e-3)


def test_a_machine_file_without_kinds_overlap_and_busy_rates_is_read_as_before(tmp_path: Path) -> None:
    raw = load_machine("h100").model_dump(mode="json", exclude_defaults=True)
    assert not {"overlap", "all_busy"} & set(raw["efficiency"])
    raw["measured"] = {
        "date": "2026-01-01",
        "device": "d",
        "torch": "2",
        "products": [],
        **{key: [1.0, 1.0, 1.0] for key in ("attention_flops_per_s", "copy_bytes_per_s", "host_bytes_per_s")},
        "collectives": [{"axis": "within", "ranks": 2, "bytes": 8, "seconds": [1.0, 1.0, 1.0]}],
    }
    (tmp_path / "old.json").write_text(json.dumps(raw))
    machine = load_machine(str(tmp_path / "old.json"))
    assert machine.measured.collectives[0].kind == "all_reduce"
    assert machine.efficiency.overlap == OVERLAP
    assert with_ranks(machine, 8) == machine


def test_a_known_name_is_no_file_to_write(tmp_path: Path) -> None:
    for wrong in ("h100", str(tmp_path / "nowhere" / "machine.json"), str(tmp_path)):
        with pytest.raises(ConfigError, match="file to write"):
            calibrate_command(wrong)
