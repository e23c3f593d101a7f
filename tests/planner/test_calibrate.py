"""`headrace plan --calibrate`: the present machine measured, as a file that a plan reads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from headrace.base.errors import ConfigError
from pipeline.machines.known import load_machine
from pipeline.machines.machine import MeasuredCollective
from pipeline.planner import calibrate, measure
from pipeline.planner.calibrate import calibrate_command
from pipeline.planner.links import Link, Topology
from pipeline.planner.measure_links import SIZES
from pipeline.planner.plan import make_plan
from pipeline.planner.planned_run import open_run
from pipeline.planner.step_time import collective_seconds
from tests.conftest import tiny_config, write_config


def test_this_machine_is_measured_and_plans_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "CPU_SHAPES", ((128, 64, 128), (256, 128, 256)))
    monkeypatch.setattr(calibrate, "_devices", lambda: 2)
    path = tmp_path / "machine.json"
    assert calibrate_command(str(path)) == 0
    machine = load_machine(str(path))
    measured = machine.measured
    assert measured is not None
    assert {each.dtype for each in measured.products} == {"bf16", "fp32"}
    assert {row.bytes for row in measured.collectives} == set(SIZES)
    for each in measured.products:
        assert 0 < each.flops_per_s[0] <= each.flops_per_s[1] <= each.flops_per_s[2] <= machine.peak_flops[each.dtype]
    assert "all-reduce" in capsys.readouterr().out
    config = write_config(tmp_path / "c.json", tiny_config(tmp_path / "no-tokens", tmp_path / "run", engine="torch"))
    assert not machine.gpu
    planned = open_run(str(config), (), machine, nodes=None, processes=2)
    assert planned.run.config.compile.enabled is False
    plan = make_plan(planned.run, planned.costs, machine)
    assert 0 < plan.step_s.low <= plan.step_s.typical <= plan.step_s.high


def test_the_range_of_a_measurement_has_what_was_waited() -> None:
    least, median, most = measure.seconds_of(lambda: time.sleep(0.01), torch.device("cpu"), repeats=3, least_s=0.0)
    assert 0.01 <= least <= median <= most
    assert measure.rates(1.0, (1.0, 2.0, 4.0)) == (0.25, 0.5, 1.0)


def test_links_explain_the_all_reduces_that_they_come_from() -> None:
    topology = Topology(4, Link(1e9, 1e-4), Link(1e9, 1e-4))
    rows = []
    for size in (1, 1 << 26):
        seconds = collective_seconds("all_reduce", size, range(4), topology)
        rows.append(MeasuredCollective(axis="within", ranks=4, bytes=size, seconds=(seconds, seconds, 2 * seconds)))
    link, shares = calibrate._links(rows)
    assert link["bytes_per_s"] == pytest.approx(1e9, rel=0.01)
    assert link["latency_s"] == pytest.approx(1e-4, rel=0.01)
    assert shares[0] == pytest.approx(0.5, rel=0.05)
    assert shares[1:] == pytest.approx([1.0, 1.0])


def test_a_known_name_is_no_file_to_write(tmp_path: Path) -> None:
    for wrong in ("h100", str(tmp_path / "nowhere" / "machine.json"), str(tmp_path)):
        with pytest.raises(ConfigError, match="file to write"):
            calibrate_command(wrong)
