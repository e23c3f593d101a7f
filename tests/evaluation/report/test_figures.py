"""Figures of a run's report: held-out loss by source, memory, MFU; the x axis in hours; a phone's width."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluation.report.curves import groups, side_charts
from pipeline.evaluation.report.inputs import Inputs
from pipeline.evaluation.report.page import page
from pipeline.evaluation.report.runs import read_run
from pipeline.runtime.metrics.journal import Journal
from tests.evaluation.report.conftest import TOKENS_PER_STEP, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def long_run(path: Path) -> Path:
    """A run whose steps 41 to 60 take ten times as long and have numbers of memory, MFU and sources."""
    make_run(path, steps=40)
    journal = Journal(path, from_step=40)
    for step in range(41, 61):
        more = {"mfu": 0.4, "memory_reserved_bytes": 3 * 2**30}
        count = {"tokens": TOKENS_PER_STEP * step, "samples": 4 * step}
        journal.write(
            "step", step, loss=2.0, lr=1e-3, grad_norm=1.0, seconds=5.0, tokens_per_second=200, **count, **more
        )
    for step in (50, 60):
        journal.write("eval", step, loss=2.1, sources={"web": 2.0, "code <b>": 1.0 if step == 60 else 3.0})
    journal.close()
    return path


def test_charts_of_memory_mfu_and_the_held_out_loss_of_each_source(tmp_path: Path) -> None:
    run = read_run("a", long_run(tmp_path / "a"))
    charts = {chart.title: chart for chart in side_charts(groups([run])[0])}
    (memory,) = charts["Peak memory of a rank, GiB"].lines
    assert memory.y[-1] == 3
    (code,) = charts["Held-out loss of code <b>, nats per token"].lines
    assert code.y.tolist() == [3.0, 1.0]
    assert "Model FLOPs utilization (MFU)" in charts
    assert run.hours()[-1] * 3600 == pytest.approx(40 * 0.5 + 20 * 5)
    plain = {chart.title for chart in side_charts(groups([read_run("b", make_run(tmp_path / "b", steps=9))])[0])}
    assert not any(title.startswith(("Peak", "Held-out", "Model")) for title in plain)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_click_draws_hours_and_a_phone_shows_whole_tables(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    runs = [read_run("a", long_run(tmp_path / "a"))]
    (tmp_path / "r.html").write_text(page(Inputs(tmp_path / "r.html", tuple(runs), None), []))
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 420, "height": 800})
        errors: list[str] = []
        shown.on("pageerror", lambda error: errors.append(str(error)))
        shown.goto((tmp_path / "r.html").as_uri())
        assert shown.evaluate("document.documentElement.scrollWidth") <= 420
        for region in shown.query_selector_all(".scroll"):
            assert region.evaluate("each => each.scrollWidth - each.clientWidth") <= 0, region.inner_text()
        assert tip(shown) == "tokens"
        shown.click("button.axis")
        assert tip(shown) == "hours"
        # 40 of 60 steps take a sixth of the time: the point of step 40 is at a sixth of the axis
        first = shown.evaluate("charts['all-loss'].lines[0].x[39] / charts['all-loss'].lines[0].x.at(-1)")
        assert first == pytest.approx(20 / 120, rel=1e-3)
        shown.click("button.axis")
        assert tip(shown) == "tokens"
        assert shown.evaluate("document.querySelectorAll('.zoomed path').length") == 0  # the first drawing is back
        assert not errors
        browser.close()


def tip(shown: Any) -> str:
    """The unit that the first visible plot shows under the pointer."""
    shown.hover(".narrow .plot svg")
    return str(shown.inner_text(".narrow .tip").splitlines()[0].split()[-1])
