"""Pipeline schedules simulated: closed forms, the order of passes of real runs, and `headrace plan --timeline`."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.layout import SCHEDULES
from pipeline.plan.drawing.timeline import chrome_trace, html_page, svg
from pipeline.plan.drawing.write_timeline import write_timeline
from pipeline.plan.predict import pipeline_simulation
from pipeline.plan.predict.closed_form_times import pipeline_step
from pipeline.plan.predict.overlap import LayerCosts, overlapped
from pipeline.plan.predict.passes import PassKind
from pipeline.plan.predict.pipeline_simulation import StageTimes, Timeline, simulate_pipeline
from pipeline.plan.predict.planned_run import PlannedRun, open_run
from pipeline.plan.predict.schedule_programs import make_program, program_of
from pipeline.runtime.machines.known import load_machine
from tests import warm
from tests.conftest import ROOT, tiny_config, write_config
from tests.html_pages import HOSTILE, assert_inert
from tests.support import output_of

SIZES = [(2, 2), (2, 4), (4, 4), (4, 8), (8, 32)]


def simulated(engine: str, schedule: str, ranks: int, micro_batches: int, virtual: int = 1) -> Timeline:
    """With passes of equal length: 1 s for F, I and W of a rank's whole layers, and messages that take no time."""
    program = make_program(engine, schedule, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual)
    times = [StageTimes(1 / virtual, 1 / virtual, 1 / virtual)] * program.stages
    return simulate_pipeline(program, times, transfers=[0.0] * (program.stages - 1))


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize(("engine", "schedule"), [("torch", "gpipe"), ("torch", "1f1b"), ("deepspeed", "1f1b")])
def test_the_bubble_of_gpipe_and_1f1b_is_the_closed_form(
    engine: str, schedule: str, ranks: int, micro_batches: int
) -> None:
    found = simulated(engine, schedule, ranks, micro_batches)
    assert found.seconds == pytest.approx(3 * (micro_batches + ranks - 1))
    assert found.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    held = [micro_batches if schedule == "gpipe" else min(ranks - rank, micro_batches) for rank in range(ranks)]
    assert [found.peak_in_flight(rank) for rank in range(ranks)] == held


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("virtual", [2, 3])
def test_virtual_stages_divide_the_bubble(ranks: int, micro_batches: int, virtual: int) -> None:
    found = simulated("torch", "interleaved_1f1b", ranks, micro_batches, virtual)
    # Narayanan et al. 2021 (arXiv:2104.04473), section 2.2: the bubble is (p - 1) / v of a micro-batch's passes
    assert found.seconds == pytest.approx(3 * (micro_batches + (ranks - 1) / virtual))
    assert found.bubble == pytest.approx((ranks - 1) / (virtual * micro_batches + ranks - 1))


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_the_zero_bubble_schedule_has_the_bubble_of_zb1p(ranks: int, micro_batches: int) -> None:
    found = simulated("torch", "zero_bubble", ranks, micro_batches, 2)
    # Qi et al. 2023 (arXiv:2401.10241), table 2, ZB-H1: (p - 1) (T_F + T_B - T_W), of half a rank's layers here
    assert found.seconds == pytest.approx(3 * micro_batches + (ranks - 1) * (1 + 1 - 1) / 2)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (2, 7), (4, 8), (8, 32)])
def test_dualpipev_has_its_papers_bubble_and_keeps_as_many_activations_on_every_rank(
    ranks: int, micro_batches: int
) -> None:
    found = simulated("torch", "dualpipev", ranks, micro_batches, 2)
    # DeepSeek-AI 2024 (arXiv:2412.19437), table 2, with ranks that have two stages: (p - 1) (T_F + 2 T_B - 3 T_W)
    assert found.seconds == pytest.approx(3 * micro_batches + (ranks - 1) * (1 + 2 * 2 - 3) / 2)
    closed = pipeline_step("dualpipev", ranks, micro_batches, 1.0, 2.0, 0.0, virtual_stages=2)
    assert closed.seconds == pytest.approx(found.seconds)
    # 2 p - r of the first stage and r + 1 of the second, as `sizes.activations` has it
    assert [found.peak_in_flight(rank) for rank in range(ranks)] == [2 * ranks + 1] * ranks


SCHEDULE_CASES = [
    (name, ranks, virtual, count)
    for name, kind in SCHEDULES.items()
    for ranks in (2, 3, 4, 8)
    for virtual in ((1,) if not kind.virtual_stages else (2,) if kind.v_shaped else (1, 2, 3))
    for count in (2 * ranks, 4 * ranks, *([2 * ranks + 1] if kind.v_shaped else []))
]


def over_ideal(schedule: str, ranks: int, micro_batches: int, virtual: int = 1, *, in_order: bool) -> float:
    """Step over the time of all passes of a rank, with messages of 0.3 % of them."""
    program = make_program("torch", schedule, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual)
    times, transfers = [StageTimes(*[1 / virtual] * 3)] * program.stages, [0.01] * (program.stages - 1)
    return simulate_pipeline(program, times, transfers=transfers, in_order=in_order).seconds / (3 * micro_batches)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_in_the_order_of_each_link_neither_deadlock_nor_cost_time(schedule: str) -> None:
    for name, ranks, virtual, count in SCHEDULE_CASES:
        if name == schedule:  # a deadlock, as a send that meets another receive would be, is an assertion within
            free, in_order = (over_ideal(name, ranks, count, virtual, in_order=each) for each in (False, True))
            assert free <= in_order <= 1.01 * free, (name, ranks, virtual, count)


def test_messages_of_a_rank_in_the_order_of_one_stream_make_interleaved_slower_than_1f1b(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = {"1f1b": (4, 8), "interleaved_1f1b": (4, 8, 2), "dualpipev": (4, 32, 2)}
    by_link = {name: over_ideal(name, *sizes, in_order=True) for name, sizes in cases.items()}
    assert by_link == pytest.approx({"1f1b": 1.383, "interleaved_1f1b": 1.193, "dualpipev": 1.041}, abs=1e-3)
    # as torch's own runtime has it with one worker thread for all messages of a rank
    monkeypatch.setattr(pipeline_simulation, "link_of", lambda *_, **__: 0)
    in_one = {name: over_ideal(name, *sizes, in_order=True) for name, sizes in cases.items()}
    assert in_one == pytest.approx({"1f1b": 1.383, "interleaved_1f1b": 1.474, "dualpipev": 1.499}, abs=1e-3)


def test_transfers_lengthen_the_way_through_the_stages() -> None:
    program = make_program("torch", "1f1b", ranks=2, micro_batches=2)
    times = [StageTimes(1.0, 2.0)] * 2
    found = simulate_pipeline(program, times, transfers=[0.5])
    # F0 0-1, sent, F0 1.5-2.5 and B0 2.5-4.5 of the last stage, sent with the request for what stage 0 has finished
    # at 2; F1 5-6, B1 6-8, sent, and B1 8.5-10.5 of the first stage
    assert found.seconds == pytest.approx(10.5)
    ends = {str(each.instruction): each.end_s for each in found.passes}
    assert ends["F1 of stage 1"] == pytest.approx(6.0)


def test_a_slow_stage_sets_the_pace() -> None:
    program = make_program("torch", "1f1b", ranks=4, micro_batches=16)
    times = [StageTimes(1.0, 2.0), StageTimes(1.0, 2.0), StageTimes(2.0, 4.0), StageTimes(1.0, 2.0)]
    found = simulate_pipeline(program, times, transfers=[0.0] * 3)
    # 16 micro-batches of 6 s through it, what comes before the first (2 x 1 s), and after the last (2 x 2 s) at least
    assert found.seconds >= 16 * 6 + 2 + 4
    assert found.idle_s(2) == pytest.approx(found.seconds - 96)
    assert found.idle_s(2) < 0.1 * found.seconds < found.idle_s(0)


CASES = [
    ("torch", "gpipe", 2, 1, 0),
    ("torch", "1f1b", 4, 1, 0),
    ("torch", "interleaved_1f1b", 2, 2, 3),
    ("torch", "zero_bubble", 2, 2, 2),
    ("torch", "dualpipev", 2, 2, 0),
    ("deepspeed", "1f1b", 2, 1, 1),
]


@pytest.mark.integration
@pytest.mark.parametrize(("engine", "schedule", "ranks", "virtual", "stage"), CASES)
def test_the_program_is_the_order_of_passes_of_a_real_run(
    tokens: Path, tmp_path: Path, engine: str, schedule: str, ranks: int, virtual: int, stage: int
) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine=engine, zero_optimization={"stage": stage})
    config["model"]["config"]["num_hidden_layers"] = 4
    del config["scheduler"]
    config["parallel"] = {"pp": ranks, "schedule": schedule}
    config["run"] |= {"steps": 2, "checkpoint_every": 2}
    path, folder = write_config(tmp_path / "c.json", config), tmp_path / "passes"
    folder.mkdir()
    output_of(warm.run("-m", "benchmarks.recorded_passes", folder, "--config", path, processes=ranks))
    program = program_of(resolve(load_config(path), world_size=ranks))
    assert program == make_program(engine, schedule, ranks=ranks, micro_batches=4, virtual_stages=virtual)
    for rank in range(ranks):
        steps = [json.loads(line)["passes"] for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
        planned = [(each.kind, each.stage, each.micro_batch) for each in program.passes(rank)]
        assert len(steps) == 2
        for passes in steps:
            assert [(PassKind(kind), of, index) for kind, of, index, *_ in passes] == planned


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
