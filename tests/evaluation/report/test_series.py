"""What is drawn of a run's numbers: means that keep the mean, at few enough points, whatever is missing."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.evaluation.report.charts import spread, tokens
from pipeline.evaluation.report.series import POINTS, settled, smooth, smoothing_window, thin


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
