"""Rollback to a checkpoint with a skip of the data since then, in full runs of train.py: losses, events, manifests."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.directory import read_manifest
from foundation.section import parse
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from pipeline.data.loader import StepLoader
from pipeline.data.skips import Skip, Skips
from pipeline.engines.build import build_engine
from pipeline.engines.objective import CrossEntropy
from pipeline.run.anomalies.suspect_samples import RunSamples
from pipeline.run.batches import RankBatches
from pipeline.run.prepare import prepare
from pipeline.runtime.metrics.journal import read_rows
from tests import warm
from tests.conftest import launch, losses, tiny_config, write_config
from tests.groups import events
from tests.run.test_changed_resume import lose_checkpoints_after
from tests.runtime.metrics.offline import logged
from tests.support import output_of

SCRIPT = Path(__file__).with_name("train_poisoned.py")
BAD_STEP, BAD_SAMPLE, CHECKPOINT = 13, 12 * 8 + 5, 10
SKIPPED = Skips((Skip(CHECKPOINT + 1, BAD_STEP - CHECKPOINT),))


def run_poisoned(config: Path, *sets: str, processes: int = 1) -> str:
    """Trains with the bad sample; returns the output."""
    overrides = [word for text in sets for word in ("--set", text)]
    return output_of(
        warm.run(SCRIPT, "--config", config, *overrides, cwd=config.parent, processes=processes, merged=True)
    )


def config_of(work: Path, tokens: Path, **fields: Any) -> Path:
    made = tiny_config(tokens, work / "run", anomalies={"non_finite": "rollback", "check_replicas": 4}, **fields)
    made["run"] |= {"keep_checkpoints": 9}
    return write_config(work / "c.json", made)


@pytest.fixture(scope="module")
def rolled_back(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a config and its finished run with one rollback, on one process."""
    work = tmp_path_factory.mktemp("rollback")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POISON", f"nan:{BAD_SAMPLE}")
        patch.setenv("WANDB_MODE", "offline")
        config = config_of(work, tokens, engine="torch", zero_optimization={"stage": 0})
        output = run_poisoned(config, "wandb.enabled=true")
    assert f"rolling back from step {BAD_STEP} to step {CHECKPOINT}" in output
    return work


def expected(work: Path) -> dict[int, float]:
    """Losses of a single process from the checkpoint on, with the data after the bad step's."""
    config = json.loads((work / "c.json").read_text()) | {"engine": "torch", "zero_optimization": {"stage": 0}}
    run = resolve(parse(Config, config | {"run": {**config["run"], "dir": str(work / "own")}}), world_size=1)
    made = prepare(run)
    engine = build_engine(run, made.model, made.values, CrossEntropy(), device=torch.device("cpu"))
    engine.load(work / f"run/checkpoints/step-{CHECKPOINT:08d}")
    loader = StepLoader(made.mixture, run.batch, dp_rank=0, steps=(CHECKPOINT + 1, run.steps), skips=SKIPPED)
    return {batch.step: engine.train_step(batch, lr=run.schedule.lr(batch.step)).loss for batch in loader}


@pytest.mark.integration
def test_after_a_rollback_training_continues_with_the_data_after_the_bad_step(rolled_back: Path) -> None:
    found, after = losses(rolled_back / "run"), expected(rolled_back)
    rows = [row["step"] for row in read_rows(rolled_back / "run", kind="step")]
    assert rows == list(range(1, 21))  # rows after the checkpoint were truncated
    assert {step: found[step] for step in after} == after  # exactly


def test_the_event_records_the_samples_the_values_and_the_skips(rolled_back: Path) -> None:
    (event,) = events(rolled_back / "run", "rollback", "non_finite", "spike")
    assert (event["event"], event["step"], event["bad_step"]) == ("rollback", CHECKPOINT, BAD_STEP)
    assert event["first_sample"] <= BAD_SAMPLE <= event["last_sample"]
    assert (event["cause"], event["what"], event["loss"], event["reproduced"]) == ("non_finite", "loss", None, True)
    assert event["skips"] == SKIPPED.plain()


def test_wandb_keeps_the_rows_from_before_and_after_the_rollback(rolled_back: Path) -> None:
    rows = logged(rolled_back / "run")
    steps = [row["train_step"] for row in rows if "loss/train" in row]
    assert steps == [*range(1, BAD_STEP), *range(CHECKPOINT + 1, 21)]
    assert [row["event/step"] for row in rows if "event/bad_step" in row] == [CHECKPOINT]
    # logged when they are written, with rows of later steps
    assert [row["event/step"] for row in rows if "event/waited_seconds" in row] == [5, 10, 15, 20]
    assert [row["train_step"] for row in rows if "loss/held_out" in row] == [20]


def test_every_later_checkpoint_records_the_skips(rolled_back: Path) -> None:
    for step in (15, 20):
        details = read_manifest(rolled_back / f"run/checkpoints/step-{step:08d}", kind="checkpoint").details
        assert details["skips"] == SKIPPED.plain()
        assert details["samples"] == (step + 3) * 8


@pytest.mark.parametrize("kept", [15, CHECKPOINT])
def test_a_run_killed_after_a_rollback_resumes_to_the_same_losses(
    rolled_back: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """At 15 the manifest has the skips; at 10, before any later checkpoint, the journal has them."""
    monkeypatch.setenv("POISON", f"nan:{BAD_SAMPLE}")
    shutil.copytree(rolled_back, tmp_path / "again")
    work = tmp_path / "again"
    for path in (work / "run/checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > kept:
            shutil.rmtree(path)
    output = run_poisoned(work / "c.json", f"run.dir={work / 'run'}")
    assert f"resuming after step {kept}" in output
    assert "rolling back" not in output
    assert losses(work / "run") == losses(rolled_back / "run")


@pytest.mark.integration
@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.sweep)])
def test_a_rollback_of_a_sharded_run_on_two_processes_gives_the_same_curve(
    rolled_back: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setenv("POISON", f"nan:{BAD_SAMPLE}")
    config = config_of(tmp_path, tokens, zero_optimization={"stage": stage})
    output = run_poisoned(config, processes=2)
    assert f"rolling back from step {BAD_STEP} to step {CHECKPOINT}" in output
    for step, loss in losses(rolled_back / "run").items():
        assert losses(tmp_path / "run")[step] == pytest.approx(loss, rel=1e-5), step


def test_a_spike_in_a_run_is_skipped_and_told(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISON", f"60:{BAD_SAMPLE + 8 * 8}")  # of step 21, when there are enough steps to compare with
    anomalies = {"spikes": "skip", "window": 16, "deviations": 20.0}  # batches this small have norms that vary
    made = tiny_config(tokens, tmp_path / "run", anomalies=anomalies, engine="torch", zero_optimization={"stage": 0})
    made["run"]["steps"] = 24
    run_poisoned(write_config(tmp_path / "c.json", made))
    (event,) = events(tmp_path / "run", "spike")
    assert (event["step"], event["action"], event["reproduced"]) == (BAD_STEP + 8, "skip", True)
    rows = {row["step"]: row for row in read_rows(tmp_path / "run", kind="step")}
    assert rows[BAD_STEP + 8]["outcome"] == "refused"
    assert [step for step, row in rows.items() if row.get("skipped")] == [BAD_STEP + 8]


def test_another_policy_resumes_a_stopped_run(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISON", f"nan:{BAD_SAMPLE}")
    made = tiny_config(tokens, tmp_path / "run", engine="torch", zero_optimization={"stage": 0})
    config = write_config(tmp_path / "c.json", made)
    done = warm.run(SCRIPT, "--config", config, cwd=tmp_path, merged=True)
    assert done.returncode == 2
    assert f"step {BAD_STEP}: the loss is nan" in done.stdout
    assert "Traceback" not in done.stdout
    assert max(losses(tmp_path / "run")) == BAD_STEP - 1
    output = run_poisoned(config, "anomalies.non_finite=skip")
    assert f"resuming after step {CHECKPOINT}" in output
    assert list(losses(tmp_path / "run")) == list(range(1, 21))


def test_a_branch_of_a_run_with_a_rollback_reads_what_its_base_reads(rolled_back: Path, tmp_path: Path) -> None:
    made = json.loads((rolled_back / "c.json").read_text())
    fields: dict[str, Any] = {"engine": "torch", "zero_optimization": {"stage": 0}, "evaluation": {"samples": 0}}
    made["run"] |= {"dir": str(tmp_path / "run"), "from": f"{rolled_back / 'run'}@15"}
    launch("train.py", write_config(tmp_path / "c.json", made | fields))
    expected = {step: loss for step, loss in losses(rolled_back / "run").items() if step > 15}
    assert losses(tmp_path / "run") == expected
    lose_checkpoints_after(tmp_path / "run", 15)  # its only record of the skip is that of its beginning
    numbers = [sample.number for sample in RunSamples.open(tmp_path / "run").samples_of_steps(16, 16)]
    assert numbers == [*range(18 * 8, 19 * 8)]


STAGE_SKIPS = Skips((Skip(5, 2, 4 + 8),))
"""Steps 5 and 6, the first two of the second stage, in which the batch grows from 4 to 8: step 6 has the bad sample."""


def test_a_rollback_within_a_later_stage_skips_its_data_and_moves_that_of_all_later_steps(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POISON", f"nan:{4 * 8 + 4 + 5}")
    ramp = {"from": 4, "to": 8, "over_tokens": 4 * 64}
    stages = [
        {"name": "short", "until": {"steps": 4}},
        {"name": "long", "until": {"steps": 8}, "data": {"sequence_length": 64}, "train_batch_size": ramp},
        {"name": "last", "data": {"sequence_length": 32}, "train_batch_size": 4},
    ]
    fields: dict[str, Any] = {"engine": "torch", "zero_optimization": {"stage": 0}, "scheduler": None, "stages": stages}
    made = tiny_config(tokens, tmp_path / "run", anomalies={"non_finite": "rollback"}, **fields)
    made["run"] |= {"steps": 10, "checkpoint_every": 8, "keep_checkpoints": 9}
    config = write_config(tmp_path / "c.json", made)
    said = run_poisoned(config)
    assert "rolling back from step 6 to step 4, skipping the data of 2 steps" in said
    rows = list(read_rows(tmp_path / "run", kind="step"))
    assert [row["tokens"] for row in rows] == [256, 512, 768, 1024, 1280, 1792, 2304, 2816, 2944, 3072]
    assert [row["samples"] for row in rows] == [8, 16, 24, 32, 36, 44, 52, 60, 64, 68]  # trained on, no skipped ones

    details = read_manifest(tmp_path / "run/checkpoints/step-00000010", kind="checkpoint").details
    assert (details["skips"], details["samples"]) == (STAGE_SKIPS.plain(), 80)
    reader = RunSamples.open(tmp_path / "run")
    short, long, last = (mixture.sources[0].windows for mixture in reader.mixtures)
    assert [(row["tokens"], row["targets"], row["epochs"]) for row in details["ledger"]] == [
        (1024, 1024, [round(32 / short, 6)]),
        (256, 256, [round((48 - 32) / long, 6)]),
        (1536, 1536, [round((72 - 32) / long, 6)]),
        (256, 256, [round((32 + 80 - 60) / last, 6)]),  # continues after the first stage, whose length it has
    ]
    numbers = [[sample.number for sample in reader.samples_of_steps(step, step)] for step in (4, 5, 6, 9)]
    assert numbers == [[*range(24, 32)], [*range(44, 48)], [*range(48, 56)], [*range(72, 76)]]
    for step in (5, 8, 9):  # step 8 has numbers that the third stage would have without the skip
        for sample in reader.samples_of_steps(step, step):
            [same] = reader.samples(sample.number, sample.number)
            assert same == replace(sample, step=None)
    assert [next(reader.samples(number, number)).stage for number in (31, 32, 43, 44)] == [0, 1, 1, 1]

    found = losses(tmp_path / "run")
    run = resolve(parse(Config, made | {"run": {**made["run"], "dir": str(tmp_path / "own")}}), world_size=1)
    for stage, first in zip(prepare(run).stages[1:], (5, 9), strict=True):
        engine = build_engine(stage.run, stage.model, stage.values, CrossEntropy(), device=torch.device("cpu"))
        engine.load(tmp_path / f"run/checkpoints/step-{first - 1:08d}")
        for batch in RankBatches(stage, 0).training(first_step=first, skips=STAGE_SKIPS):
            assert engine.train_step(batch, lr=3e-3).loss == found[batch.step], batch.step
    lose_checkpoints_after(tmp_path / "run", 4)
    assert "rolling back" not in run_poisoned(config)  # the journal has the skip
    assert losses(tmp_path / "run") == found
