"""A real ladder of three sizes: killed and gone on with, fitted, and refused where its fit is too poor."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from foundation.configfile import load
from pipeline.plan.ladder.runs import finished_loss
from tests.conftest import tiny_config, write_config
from tests.support import alive, kill, output_of, wait_until
from tests.warm_python import descendants, python

pytestmark = pytest.mark.integration
_MINUTES = 15


def _command(config: Path, *more: str) -> list[str]:
    words = ["--rungs", "3", "--smallest", "0.1", "--largest", "0.6", "--budgets", "0.5,1", "--learning-rates", "1"]
    return [python(), "-P", "-m", "pipeline", "ladder", "--config", str(config), *words, *more]


def _finished(runs: Path) -> dict[str, int]:
    """Finished runs, with their held-out loss -> when their metrics were last written."""
    steps = {path.parent: json.loads(path.read_text())["details"]["steps"] for path in runs.glob("*/manifest.json")}
    return {
        run.name: (run / "metrics.jsonl").stat().st_mtime_ns
        for run, last in steps.items()
        if finished_loss(run, steps=last) is not None
    }


@pytest.mark.sweep
def test_a_killed_ladder_goes_on_and_a_poor_fit_is_not_extrapolated(tokens: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fields = tiny_config(tokens, run_dir, engine="reference", zero_optimization={"stage": 0})
    config = write_config(tmp_path / "large.json", {**fields, "run": {"dir": str(run_dir), "steps": 400, "seed": 7}})
    output = tmp_path / "run-ladder"
    started = subprocess.Popen(_command(config), start_new_session=True)
    wait_until((output / "logs").exists, within_s=60 * _MINUTES)
    while len(_finished(output / "runs")) < 2:
        assert started.poll() is None
        time.sleep(0.2)
    at_work = descendants(started.pid)
    kill(started)
    wait_until(lambda: not any(map(alive, at_work)))  # the run that was at work ends with it
    before = _finished(output / "runs")

    # a law of this few steps is a poor one: what is tested is that it is used as it is told to be
    said = output_of(
        subprocess.run([*_command(config, "--tolerance", "0.5", "--json")], capture_output=True, text=True, check=False)
    )
    results = json.loads(said)
    assert len(results["runs"]) == 6
    after = _finished(output / "runs")
    assert {name: after[name] for name in before} == before, "finished runs are not trained again"
    found = results["prediction"]
    assert found["low"] <= found["loss"] <= found["high"] < max(run["loss"] for run in results["runs"]) * 1.1
    assert load(output / "config.json")["optimizer"]["params"]["lr"] == 3e-3
    assert (output / "ladder.svg").read_text().startswith("<?xml")

    refused = subprocess.run(_command(config, "--tolerance", "1e-6"), capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "not usable" in refused.stdout
    assert "prediction" not in refused.stdout
    assert not (output / "config.json").exists(), "the config of the fit before is gone"
    assert json.loads((output / "results.json").read_text())["prediction"] is None
