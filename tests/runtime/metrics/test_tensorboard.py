"""TensorBoard event files: what training writes is what TensorBoard reads back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.sections.deepspeed import TensorBoardSection
from pipeline.runtime.metrics import tensorboard_sink
from pipeline.runtime.metrics.journal import read_rows
from pipeline.runtime.metrics.tensorboard_sink import TensorBoardSink, log_dir
from tests.conftest import launch, losses, tiny_config, write_config


def scalars(directory: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def section_of(**fields: Any) -> TensorBoardSection:
    return parse(TensorBoardSection, {"enabled": True, **fields})


def test_losses_of_a_run_and_its_resume_are_read_back_from_the_event_files(tokens: Path, tmp_path: Path) -> None:
    fields = {"engine": "torch", "zero_optimization": {"stage": 0}, "tensorboard": {"enabled": True}}
    config = tiny_config(tokens, tmp_path / "run", **fields)
    config.pop("scheduler")
    path = write_config(tmp_path / "c.json", config)
    for steps in (3, 5):
        launch("train.py", path, f"run.steps={steps}")
    shown = scalars(tmp_path / "run/tensorboard/run")
    assert shown["loss"] == pytest.approx(losses(tmp_path / "run"))
    assert {"lr", "grad_norm", "eval/loss"} < shown.keys()
    evaluations = {row["step"]: row["loss"] for row in read_rows(tmp_path / "run", kind="eval")}
    assert shown["eval/loss"] == pytest.approx(evaluations)


def test_after_a_rollback_the_abandoned_steps_are_hidden(tmp_path: Path) -> None:
    sink = TensorBoardSink(section_of(), run_dir=str(tmp_path / "run"))
    sink.write("event", 0, event="started", world_size=1)
    for step in range(1, 7):
        sink.write("step", step, loss=float(step))
    sink.write("event", 3, event="rollback", bad_step=6)
    for step in (4, 5):
        sink.write("step", step, loss=10.0 * step)
    sink.close()
    shown = scalars(tmp_path / "run/tensorboard/run")
    assert shown == {"loss": {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 5: 50.0}}


def test_a_non_finite_loss_is_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(section_of(), run_dir=str(tmp_path / "run"))
    sink.write("step", 1, loss=math.nan)
    sink.close()
    assert math.isnan(scalars(tmp_path / "run/tensorboard/run")["loss"][1])


def test_event_files_are_in_output_path_and_job_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert log_dir(section_of(), run_dir=str(run)) == run / "tensorboard/run"
    assert log_dir(section_of(output_path="tb", job_name="first"), run_dir=str(run)) == Path("tb/first")
    assert log_dir(section_of(output_path=""), run_dir=str(run)) == run / "tensorboard/run"  # DeepSpeed's default


def test_a_missing_package_is_refused_with_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard_sink, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoardSink(section_of(), run_dir=str(tmp_path / "run"))
    tensorboard_sink.check_tensorboard(section_of(enabled=False))


def test_training_continues_without_event_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = TensorBoardSink(section_of(output_path="/proc"), run_dir=str(tmp_path / "run"))
    for step in (1, 2):
        sink.write("step", step, loss=1.0)
    sink.close()
    assert capsys.readouterr().err.count("warning: TensorBoard event files") == 1
