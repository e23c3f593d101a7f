"""Charts and their series: few bytes for many rows, a visible point for one; figures of masked tokens."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from pipeline.evaluation.report import svg
from pipeline.evaluation.report.charts import Chart, ChartLine, draw, name_label, spread, tokens
from pipeline.evaluation.report.curves import groups, loss_chart, remarks, side_charts
from pipeline.evaluation.report.runs import read_run
from pipeline.evaluation.report.series import POINTS, settled, smooth, smoothing_window, thin
from tests import warm
from tests.evaluation.heldout.small import SEQUENCE, every_third, make_masked
from tests.evaluation.report.conftest import TOKENS_PER_STEP, make_run
from tests.support import output_of


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


def test_stages_are_bands_of_tokens_and_runs_together_have_those_they_share(tmp_path: Path) -> None:
    accounts = [(("stable", 8), ("stable", 4), ("decay", 28)), (("stable", 12), ("other", 28))]
    places = [tmp_path / name for name in ("a", "b")]
    for place, stages in zip(places, accounts, strict=True):
        ledger, first = [], 1
        for name, steps in stages:  # a ramp's stage has a row for each batch size
            row = {"stage": name, "first_step": first, "last_step": first + steps - 1, "samples_per_step": 4}
            ledger.append({**row, "sequence_length": 250, "tokens": TOKENS_PER_STEP * steps})
            first += steps
        make_run(place, steps=30, planned=40, details={"ledger": ledger})
    one, other = (read_run(place.name, place) for place in places)
    plain = read_run("plain", make_run(tmp_path / "plain", steps=30))
    (alone,), (both,), (mixed,) = groups([one]), groups([one, other]), groups([one, plain])
    assert [(band.name, band.begin, band.end) for band in alone.bands] == [
        ("stable", 0, 12 * TOKENS_PER_STEP),
        ("decay", 12 * TOKENS_PER_STEP, 40 * TOKENS_PER_STEP),
    ]
    assert [band.name for band in both.bands] == ["stable"]
    assert mixed.bands == []
    charts = {name: loss_chart(group) for name, group in (("alone", alone), ("both", both), ("mixed", mixed))}
    named = {name: draw(chart, width=900, height=300) for name, chart in charts.items()}
    assert [re.findall(">(stable|decay)<", text) for text in named.values()] == [["stable", "decay"], ["stable"], []]
    assert "Bands, from the left: stage stable, stage decay." in list(remarks(alone, charts["alone"]))
    # half of the shared stage's room: no name that would run into the next
    assert ">stable<" not in draw(charts["both"], width=120, height=100)


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
    assert run.series("tokens")[-1] == 5000 * run.tokens_per_step[0]
    assert peak < 300 * run.steps  # a row takes over 1,000 bytes; of evaluations there are 500


@pytest.mark.integration  # numbers of masked tokens: evaluation/heldout/test_commands.py
def test_bits_per_byte_are_absent_with_a_loss_mask(model: Path, tokens: Path, run_dir: Path, tmp_path: Path) -> None:
    masked = make_masked(tmp_path / "masked", tokens, every_third)
    data = ["--data", masked, "--sequence-length", SEQUENCE, "--max-tokens", 320]
    named = ["--run", f"a={run_dir}", "--model", f"small={model}"]
    said = output_of(warm.run("-m", "pipeline", "report", tmp_path / "r.html", *named, *data))
    assert re.search(r"small .* -  ", said)
    assert "<td>-</td>" in (tmp_path / "r.html").read_text()


@pytest.mark.integration  # numbers of masked tokens: evaluation/heldout/test_commands.py
def test_a_model_is_quantized_on_masked_tokens(model: Path, tokens: Path, tmp_path: Path) -> None:
    masked = make_masked(tmp_path / "masked", tokens, every_third)
    data = {"path": str(masked), "sequence_length": SEQUENCE}
    config = {"model": str(model), "output": str(tmp_path / "small"), "scheme": "W8A16", "data": data}
    (tmp_path / "c.json").write_text(json.dumps(config))
    said = output_of(warm.run("-m", "pipeline.quantize", "--config", tmp_path / "c.json"))
    assert re.search(r"bits per byte .* - .* - ", said)


def test_downsampling_takes_means_of_neighbors() -> None:
    assert thin(np.arange(12.0), points=4).tolist() == [1.0, 4.0, 7.0, 10.0]
    assert thin(np.arange(5.0), points=9).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("rows", [1, POINTS, POINTS + 1, 100_000])
def test_no_line_has_more_points_than_a_page_can_show(rows: int) -> None:
    values = np.sin(np.arange(rows, dtype=np.float64))
    thinned = thin(values)
    assert thinned.size == min(rows, POINTS)
    # buckets differ by one step in size, so that the mean of means is off by a trifle
    assert thinned.mean() == pytest.approx(values.mean(), abs=2e-3)


def test_smoothing_is_centered_and_keeps_a_straight_line() -> None:
    line = np.arange(20.0)
    assert smooth(line, window=5)[2:-2] == pytest.approx(line[2:-2])
    assert smooth(line, window=5)[0] == pytest.approx(1.0)  # the mean of 0, 1, 2: what there is of the window
    assert smooth(line, window=1) == pytest.approx(line)


def test_a_non_finite_step_does_not_affect_its_neighbors() -> None:
    values = np.array([1.0, np.inf, 3.0, np.nan, 5.0])
    assert smooth(values, window=3) == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])
    assert thin(np.array([np.nan, np.nan, 1.0, 3.0]), points=2) == pytest.approx([np.nan, 2.0], nan_ok=True)
    assert settled(values).tolist() == [1.0, 3.0, 5.0]


def test_the_smoothing_window_is_odd_and_bounded() -> None:
    windows = [smoothing_window(steps) for steps in (1, 12, 240, 5_000, 1_000_000)]
    assert windows == [1, 1, 5, 101, 301]


def test_overlapping_labels_are_spread_in_order() -> None:
    placed = spread([0.5, 0.5, 0.9, 0.5], gap=0.1)
    assert placed == pytest.approx([0.4, 0.5, 0.9, 0.6])
    assert min(spread([0.0, 0.0], gap=0.1)) >= 0.05


def test_counts_of_tokens_are_short() -> None:
    assert [tokens(n) for n in (0, 800, 12_000, 1.5e6, 3e9, 2e12)] == ["0", "800", "12k", "1.5M", "3B", "2T"]
