"""Drawings and traces of a simulated step."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from pipeline.plan.drawing.timeline import chrome_trace, html_page, svg
from pipeline.plan.predict.pipeline_simulation import StageTimes, Timeline, simulate_pipeline
from pipeline.plan.predict.schedule_programs import make_program
from tests.html_pages import HOSTILE, assert_inert

SVG = "{http://www.w3.org/2000/svg}"


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
