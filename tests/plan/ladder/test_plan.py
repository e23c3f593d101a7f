"""A ladder's runs: sizes, budgets, scaled configs and refusals; a real one is killed, goes on, and is fitted."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from foundation.configfile import load
from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from pipeline.plan.ladder.large_run import read_large_run
from pipeline.plan.ladder.learning_rate import choose
from pipeline.plan.ladder.plan import Ladder, Options, plan_ladder
from pipeline.plan.ladder.runs import Done, finished_loss, train_all, write_config
from tests.conftest import tiny_config
from tests.support import alive, kill, output_of, wait_until
from tests.warm_python import descendants, python

OPTIONS = Options(rungs=3, smallest=0.1, largest=0.6, budgets=(0.5, 1.0), learning_rates=3)


def _raw(tokens: Path, run_dir: Path, **fields: Any) -> dict[str, Any]:
    scheduler = {"type": "WSD", "params": {"warmup_num_steps": 40, "decay_num_steps": 100}}
    return tiny_config(
        tokens, run_dir, run={"dir": str(run_dir), "steps": 800, "seed": 7}, scheduler=scheduler, **fields
    )


@pytest.fixture
def ladder(tokens: Path, tmp_path: Path) -> Ladder:
    return plan_ladder(read_large_run(_raw(tokens, tmp_path / "run")), OPTIONS, tmp_path / "ladder")


def test_rungs_grow_and_stay_below_the_large_run(ladder: Ladder) -> None:
    sizes = [rung.counts.multiplied for rung in ladder.rungs]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] < ladder.large.counts.multiplied
    assert len(ladder.runs()) == 6
    assert ladder.flops() < ladder.large.flops


def test_a_budget_is_a_multiple_of_the_large_run_s_tokens_per_parameter(ladder: Ladder) -> None:
    ratio = ladder.large.tokens / ladder.large.counts.multiplied
    for run, budget in zip(ladder.runs(), OPTIONS.budgets * 3, strict=True):
        assert run.tokens / run.rung.counts.multiplied == pytest.approx(budget * ratio, rel=0.05)


def test_every_run_is_an_ordinary_config(ladder: Ladder) -> None:
    for run in [*ladder.sweep(), *ladder.runs()]:
        resolved = resolve(parse(Config, ladder.config(run)), world_size=1)
        assert resolved.steps * resolved.batch.tokens == run.tokens
        assert resolved.batch.samples == run.samples
        assert resolved.schedule.peak == run.learning_rate
        assert resolved.schedule.warmup / run.steps == pytest.approx(40 / 800, abs=0.02)
        assert resolved.schedule.decay / run.steps == pytest.approx(100 / 800, abs=0.02)
        assert resolved.config.evaluation.samples == 16, "the held-out text is that of the large run"


def test_a_decay_without_a_warmup_stays_one(tokens: Path, tmp_path: Path) -> None:
    raw = _raw(tokens, tmp_path / "run")
    raw["scheduler"] = {"type": "WSD", "params": {"warmup_num_steps": 0, "decay_num_steps": 800}}
    ladder = plan_ladder(read_large_run(raw), OPTIONS, tmp_path / "ladder")
    for run in ladder.runs():
        schedule = resolve(parse(Config, ladder.config(run)), world_size=1).schedule
        assert (schedule.warmup, schedule.decay) == (0, run.steps)


def test_all_rates_of_muon_are_scaled_alike(tokens: Path, tmp_path: Path) -> None:
    """A rate of its own would be the same in all runs of the sweep."""
    muon = {"type": "Muon", "params": {"lr": 3e-3, "muon_lr": 6e-3, "weight_decay": 0.1}}
    ladder = plan_ladder(read_large_run(_raw(tokens, tmp_path / "run", optimizer=muon)), OPTIONS, tmp_path / "ladder")
    for run in ladder.sweep():
        params = ladder.config(run)["optimizer"]["params"]
        assert params["lr"] == run.learning_rate
        assert params["muon_lr"] == pytest.approx(2 * run.learning_rate)
        assert "adam_lr" not in params


def test_smaller_models_have_higher_rates_and_shorter_runs_smaller_batches(ladder: Ladder) -> None:
    runs = ladder.runs()
    assert all(run.learning_rate > 3e-3 for run in runs if run.tokens > 0.3 * ladder.large.tokens)
    assert all(run.samples < 8 for run in runs)
    assert [run.learning_rate for run in ladder.runs(0.5)] == pytest.approx(
        [run.learning_rate / 2 for run in runs], rel=1e-2
    )


def test_the_middle_of_the_sweep_is_a_run_of_the_ladder(ladder: Ladder) -> None:
    """It is trained once."""
    names = [run.name for run in ladder.sweep()]
    assert len(names) == 3
    assert names[1] in {run.name for run in ladder.runs()}


def _done(ladder: Ladder, *losses: float) -> list[Done]:
    return [Done(run, loss) for run, loss in zip(ladder.sweep(), losses, strict=True)]


def test_the_config_s_learning_rate_is_kept_where_no_other_is_clearly_better(ladder: Ladder) -> None:
    assert choose(_done(ladder, 4.0, 3.901, 3.9), range(-1, 2)).factor == 1.0


def test_a_better_learning_rate_is_that_of_the_parabola_s_lowest_point(ladder: Ladder) -> None:
    """Losses 4 + 0.1 (x + 0.75)^2 at x = -2 ... 0, of a sweep of the middle three: at its lower end."""
    losses = [4 + 0.1 * (x + 0.75) ** 2 for x in (-2, -1, 0)]
    found = choose(_done(ladder, *losses), range(-2, 1))
    assert not found.at_the_end
    assert found.factor == pytest.approx(2**-0.75)


def test_a_best_rate_at_the_end_of_the_sweep_is_told(ladder: Ladder) -> None:
    found = choose(_done(ladder, 3.0, 3.5, 4.0), range(-1, 2))
    assert (found.factor, found.at_the_end) == (0.5, True)


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({"train_batch_size": None}, "train_batch_size"),
        ({"distill": {"teacher": "x"}}, "distill"),
        ({"model": {"path": "x"}}, "model.path"),
    ],
)
def test_a_meaningless_ladder_is_refused(tokens: Path, tmp_path: Path, fields: dict[str, Any], at: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_large_run(_raw(tokens, tmp_path / "run", **fields))
    assert refused.value.field == at


@pytest.mark.parametrize(
    ("options", "at"),
    [
        (Options(rungs=2), "--rungs"),
        (Options(smallest=0.5, largest=0.2), "--smallest / --largest"),
        (Options(budgets=(1.0,)), "--budgets"),
        (Options(learning_rates=4), "--learning-rates"),
        (Options(rungs=9, smallest=0.3, largest=0.6), "--smallest / --largest"),
        (Options(rungs=3, smallest=0.1, largest=0.6, budgets=(0.001, 1.0)), "--smallest"),
    ],
)
def test_options_that_give_no_ladder_are_refused(tokens: Path, tmp_path: Path, options: Options, at: str) -> None:
    large = read_large_run(_raw(tokens, tmp_path / "run"))
    with pytest.raises(ConfigError) as refused:
        plan_ladder(large, options, tmp_path)
    assert refused.value.field == at


def test_a_run_that_was_begun_with_another_config_is_refused(ladder: Ladder, tokens: Path, tmp_path: Path) -> None:
    run = ladder.runs()[0]
    write_config(ladder, run)
    ladder.run_dir(run).mkdir(parents=True)
    changed = _raw(tokens, tmp_path / "run", gradient_clipping=0.5)
    other = plan_ladder(read_large_run(changed), OPTIONS, ladder.output)
    with pytest.raises(ConfigError, match="was trained with another config"):
        train_all(other, [run], jobs=1, nproc=1, say=print)


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
    config = tmp_path / "large.json"
    config.write_text(json.dumps({**fields, "run": {"dir": str(run_dir), "steps": 400, "seed": 7}}))
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
