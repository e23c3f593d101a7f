"""The table of mixtures of experts in docs/performance.md is the planner's."""

from __future__ import annotations

import pytest

from tests.plan.fake_gpu.expert_page import PAGE, page


@pytest.mark.integration
def test_the_page_shows_what_the_planner_says() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run: python -m tests.plan.fake_gpu.expert_page"
