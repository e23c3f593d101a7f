"""`headrace plan --timeline FILE`."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.plan.drawing.timeline import chrome_trace, html_page, svg
from pipeline.plan.drawing.write_timeline import write_timeline
from pipeline.plan.predict.overlap import LayerCosts, overlapped
from pipeline.plan.predict.pipeline_simulation import StageTimes, Timeline, simulate_pipeline
from pipeline.plan.predict.planned_run import PlannedRun, open_run
from pipeline.plan.predict.schedule_programs import make_program
from pipeline.runtime.machines.known import load_machine
from tests import warm
from tests.conftest import ROOT
from tests.html_pages import HOSTILE, assert_inert

SVG = "{http://www.w3.org/2000/svg}"


def planned(name: str, processes: int) -> PlannedRun:
    return open_run(str(ROOT / "ds_configs" / name), (), load_machine("h100"), nodes=None, processes=processes)


def test_a_run_without_a_pipeline_is_drawn_as_two_streams(tmp_path: Path) -> None:
    found = planned("fsdp.json", 2)
    for extension in ("html", "svg", "json"):
        assert "computation and communication" in write_timeline(found, tmp_path / f"step.{extension}")
    events = [e for e in json.loads((tmp_path / "step.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["cat"] for e in events} == {"gather", "forward", "backward", "reduce"}
    for stream in (0, 1):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == stream)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(own))
    ET.fromstring((tmp_path / "step.svg").read_text())
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")


def test_a_pipeline_is_drawn_pass_by_pass(tmp_path: Path) -> None:
    found = planned("pp.json", 4)
    write_timeline(found, tmp_path / "step.json")
    events = [e for e in json.loads((tmp_path / "step.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {0, 1}
    assert len(events) == 2 * 2 * found.run.batch.accumulation


def test_without_overlap_one_stream_waits_for_the_other() -> None:
    found = overlapped([LayerCosts(1.0, 2.0, 0.5, 0.25)] * 3, regather=False, beside=False)
    assert found.seconds == pytest.approx(found.compute_s + found.communication_s)
    assert found.exposed_s == pytest.approx(3 * 0.75)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--timeline", "step.png"), ".html, .svg"),
        (("--timeline", "nowhere/step.svg"), "no directory nowhere"),
        (("--timeline", "step.svg", "--search"), "leave out --search"),
    ],
)
def test_a_timeline_that_cannot_be_written_is_refused_first(options: tuple[str, ...], said: str) -> None:
    done = warm.run("-m", "pipeline", "plan", "--config", "ds_configs/pp.json", *options, merged=True)
    assert done.returncode == 2
    assert said in done.stdout


def test_the_json_of_a_pipeline_s_plan_is_alone_on_standard_output() -> None:
    options = ("--config", "ds_configs/pp.json", "--machine", "h100", "--processes", "4", "--json")
    done = warm.run("-m", "pipeline", "plan", *options)
    assert json.loads(done.stdout)["layout"]["pp"] == 2


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    program = make_program("torch", "zero_bubble", ranks=2, micro_batches=4, virtual_stages=2)
    return simulate_pipeline(program, [StageTimes(1.0, 1.0, 0.5)] * 4, transfers=[0.1] * 3)


def test_the_drawing_has_a_bar_for_every_pass_in_its_place(timeline: Timeline) -> None:
    root = ET.fromstring(svg(timeline))
    bars = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    assert len(bars) == len(timeline.passes)
    boxes = [bar.find(f"{SVG}rect") for bar in bars]
    rights = [float(box.get("x")) + float(box.get("width")) for box in boxes if box is not None]
    assert max(rights) == pytest.approx(1192, abs=0.05)  # the step ends at the right edge
    widths = sum(float(box.get("width")) for box in boxes if box is not None)
    busy = sum(timeline.seconds - timeline.idle_s(rank) for rank in range(2))
    assert widths == pytest.approx(busy / timeline.seconds * (1192 - 110), rel=1e-3)  # labels are left of 110


def test_the_page_has_the_drawing_and_needs_nothing_from_elsewhere(timeline: Timeline) -> None:
    page = html_page({HOSTILE: timeline})
    assert_inert(page)
    assert page.count("<svg ") == 1
    assert "src=" not in page
    assert "href=" not in page


def test_the_chrome_trace_has_all_passes_in_microseconds(timeline: Timeline) -> None:
    events = [each for each in json.loads(json.dumps(chrome_trace(timeline)))["traceEvents"] if each["ph"] == "X"]
    assert len(events) == len(timeline.passes)
    assert max(each["ts"] + each["dur"] for each in events) == pytest.approx(timeline.seconds * 1e6)
    assert {each["pid"] for each in events} == {0, 1}
