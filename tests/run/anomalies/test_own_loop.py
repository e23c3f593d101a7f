"""In a custom training loop a non-finite gradient raises an error, and leaves the state unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import warm
from tests.support import output_of

PLAIN = {"gradient_clipping": 0}
CASES = {
    **{f"torch-{stage}": {"engine": "torch", "zero_optimization": {"stage": stage}, **PLAIN} for stage in (0, 3)},
    **{f"deepspeed-{stage}": {"zero_optimization": {"stage": stage}, **PLAIN} for stage in (0, 1, 2, 3)},
    "deepspeed-0, clipped": {"zero_optimization": {"stage": 0}, "gradient_clipping": 0.15},
    "deepspeed-2, bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    work = tmp_path_factory.mktemp("own_loop")
    (work / "cases.json").write_text(json.dumps(CASES))
    output_of(warm.run("-m", "tests.run.anomalies.own_loop", work / "cases.json", work / "out.json", processes=2))
    results: dict[str, list[dict[str, Any]]] = json.loads((work / "out.json").read_text())
    return results


@pytest.mark.parametrize("name", CASES)
def test_a_non_finite_gradient_raises_and_changes_no_state(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    for own in results[name]:
        assert own["poisoned"]["raised"]
        assert own["poisoned"]["same"]
        assert own["poisoned"]["entries"] >= 4
        assert own["poisoned"]["losses"] == own["left out"]["losses"]  # exactly, for the following updates
