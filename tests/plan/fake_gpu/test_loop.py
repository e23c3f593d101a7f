"""The training loop itself, with loader, journal and evaluation, on the fake device: how often the host reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.plan.fake_gpu import guard
from tests.conftest import ROOT, tiny_config, write_config
from tests.support import output_of


@pytest.mark.skipif(guard.missing() is not None, reason=guard.missing() or "")
@pytest.mark.integration
def test_the_loop_reads_the_device_once_a_step_a_step_late_and_once_an_evaluation(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tokens,
        tmp_path / "run",
        engine="torch",
        zero_optimization={"stage": 0},
        bf16={"enabled": True},
        evaluation={"samples": 16, "every": 2},
    )
    command = [sys.executable, "-m", "tests.plan.fake_gpu.loop", str(write_config(tmp_path / "c.json", config))]
    said = output_of(subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300))
    found = json.loads(said.splitlines()[-1])
    assert found["steps"] == 5  # up to the first checkpoint
    assert found["waits"] == {}
    assert sum(found["deferred"].values()) == 5
    assert found["unpinned"] == {}
    assert [each["step"] for each in found["evaluations"]] == [2, 4]
    for evaluation in found["evaluations"]:
        assert evaluation["batches"] == 8
        assert sum(evaluation["waits"].values()) == 1  # the sum, after the last batch
        assert evaluation["deferred"] == {}
