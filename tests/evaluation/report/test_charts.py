"""The SVG of charts: few bytes for many rows, something to see for one, and nothing that clashes within a page."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from pipeline.evaluation.report import svg
from pipeline.evaluation.report.charts import Chart, ChartLine, draw, name_label
from pipeline.evaluation.report.curves import groups, loss_chart, remarks, side_charts
from pipeline.evaluation.report.runs import read_run
from tests.evaluation.report.made import TOKENS_PER_STEP, make_run


def chart_of(*values: np.ndarray, name: str = "a run") -> Chart:
    lines = [ChartLine(i, name, 1.0 + np.arange(y.size), y, (np.array([1.0]), y[:1])) for i, y in enumerate(values)]
    return Chart("loss", "Loss", lines, cut=True)


def test_a_hundred_thousand_rows_give_a_small_chart() -> None:
    rng = np.random.default_rng(0)
    drawn = draw(chart_of(2 + rng.random(100_000)), width=900, height=300)
    # 600 points of about 25 bytes in each of two lines, and the frame
    assert 20_000 < len(drawn) < 60_000


def test_a_single_row_is_a_visible_point() -> None:
    drawn = draw(chart_of(np.array([2.5])), width=300, height=200, label=name_label)
    assert "a run 2.50" in drawn
    assert len(re.findall(r"<use ", drawn)) == 2  # the training loss and the held-out loss


@pytest.mark.parametrize("values", [[np.nan, np.nan], [np.inf, 1.0], [0.0, 0.0], [1e9, 1e-9]])
def test_unusual_values_are_drawn_without_warnings(values: list[float], recwarn: pytest.WarningsRecorder) -> None:
    assert "<svg" in draw(chart_of(np.array(values)), width=300, height=200, label=name_label)
    assert not recwarn.list


def test_colors_follow_the_page_and_text_stays_text() -> None:
    drawn = draw(chart_of(np.array([3.0, 2.0]), np.array([4.0, 1.0])), width=300, height=200)
    assert "#fe00" not in drawn
    assert {"var(--series-1)", "var(--series-2)", "var(--muted)", "var(--rule)"} <= set(
        re.findall(r"var\([^)]*\)", drawn)
    )
    assert re.search(r"<text [^>]*>tokens</text>", drawn)


def test_ids_of_two_charts_are_distinct() -> None:
    one, other = (draw(chart_of(np.array([3.0, 2.0])), width=300, height=200, variant=v) for v in ("", "-narrow"))
    ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', one)) <= ids[0]


def test_equal_runs_give_equal_bytes() -> None:
    one, again = (draw(chart_of(np.array([3.0, 2.0])), width=300, height=200) for _ in range(2))
    assert one == again


def test_a_name_is_shown_as_it_is_written() -> None:
    drawn = draw(chart_of(np.array([3.0, 2.0]), name="a<b> & $x_2$ 水車"), width=500, height=200, label=name_label)
    assert "a&lt;b&gt; &amp; $x_2$ 水車" in drawn


def test_the_first_runs_differ_in_dash_and_color() -> None:
    looks = {(svg.color(i), svg.dash(i)) for i in range(12)}
    assert len(looks) == 12


def test_values_above_the_chart_are_mentioned_in_the_caption(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=200)
    (group,) = groups([read_run("run", path)])
    chart = loss_chart(group)
    assert chart.limits()[1] < chart.highest()
    assert any("are above the chart" in text for text in remarks(group, chart))


def test_runs_of_very_different_length_get_separate_charts(tmp_path: Path) -> None:
    short, long = make_run(tmp_path / "short", steps=4), make_run(tmp_path / "long", steps=40)
    assert [len(group.runs) for group in groups([read_run("a", short), read_run("b", long)])] == [1, 1]
    assert [len(group.runs) for group in groups([read_run("a", long), read_run("b", long)])] == [2]


def test_the_chart_of_a_distilled_run_shows_its_cross_entropy(tmp_path: Path) -> None:
    (group,) = groups([read_run("student", make_run(tmp_path / "run", steps=20, distilled=True))])
    (line,) = loss_chart(group).lines
    assert line.y.max() < 10  # its loss, a mixture, starts above 50 here
    assert [chart.name for chart in side_charts(group)][-1] == "all-kl"
    assert any("student is distilled" in text for text in remarks(group, loss_chart(group)))


def test_evaluations_are_placed_at_the_tokens_trained_on(tmp_path: Path) -> None:
    at, losses = read_run("run", make_run(tmp_path / "run", steps=20)).evaluated()
    assert at.tolist() == [10 * TOKENS_PER_STEP, 20 * TOKENS_PER_STEP]
    assert losses.shape == (2,)


def test_steps_are_read_as_columns_since_rows_of_millions_would_take_gigabytes(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=5000)
    tracemalloc.start()
    run = read_run("run", path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert run.steps == 5000
    assert run.series("tokens")[-1] == 5000 * run.tokens_per_step
    assert peak < 300 * run.steps  # a row takes over 1,000 bytes; of evaluations there are 500
