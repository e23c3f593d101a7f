"""Metrics: the journal after a crash, perplexity, peak FLOP/s, W&B, TensorBoard, and what a run prints."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.sections.deepspeed import TensorBoardSection, WandbSection
from pipeline.runtime.metrics import console, tensorboard_sink
from pipeline.runtime.metrics.console import SmoothedLoss, TimeLeft, TrainingDisplay
from pipeline.runtime.metrics.journal import Journal, read_rows
from pipeline.runtime.metrics.mfu import mfu, peak_flops
from pipeline.runtime.metrics.perplexity import bits_per_byte, perplexity
from pipeline.runtime.metrics.step_clock import StepCost
from pipeline.runtime.metrics.tensorboard_sink import TensorBoardSink, log_dir
from pipeline.runtime.metrics.time_sums import TimeSums
from pipeline.runtime.metrics.wandb_sink import WandbSink
from tests.conftest import command_line, launch, losses, room_for, tiny_config, write_config
from tests.runtime.metrics.offline import logged


def test_reopening_a_journal_removes_later_rows_and_a_partial_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, from_step=0)
    for step in range(1, 6):
        journal.write("step", step, loss=1.0 / step)
    journal.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 6, "lo')
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3, 4, 5]
    again = Journal(tmp_path, from_step=3)
    again.write("step", 4, loss=9.0)
    again.close()
    assert [(row["step"], row["loss"]) for row in read_rows(tmp_path, kind="step")][-2:] == [(3, 1 / 3), (4, 9.0)]


def test_rows_say_when_they_were_written(tmp_path: Path) -> None:
    before = datetime.now(UTC)
    journal = Journal(tmp_path, from_step=0)
    journal.write("step", 1, loss=1.0)
    journal.close()
    (row,) = read_rows(tmp_path)
    assert row["time"].endswith("Z")
    assert before - timedelta(seconds=1) < datetime.fromisoformat(row["time"]) <= datetime.now(UTC)


def test_a_damaged_line_is_kept_and_named_in_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ['{"kind": "step", "step": 1}', "nonsense", "[1]", "\0" * 9, '{"kind": "step", "step": 2}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2]
    assert "metrics.jsonl is damaged in line 2, 3, 4, which is skipped" in capsys.readouterr().err
    Journal(tmp_path, from_step=1).close()
    assert (tmp_path / "metrics.jsonl").read_text() == "\n".join(lines[:-1]) + "\n"


@pytest.mark.parametrize("from_step", [0, 1, 37, 199, 200, 300])
def test_a_resume_looks_for_its_step_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_step: int
) -> None:
    monkeypatch.setattr("pipeline.runtime.metrics.journal._TAIL", 300)
    journal = Journal(tmp_path, from_step=0)
    for step in range(1, 201):
        if step % 3 == 0:
            journal.write("event", step, event="compiled")  # before its step
        journal.write("step", step, loss=1.0 / step)
        if step % 10 == 0:
            journal.write("event", step - 4, event="checkpoint", seconds=0.5)  # written in the background
            journal.write("eval", step, loss=2.0)
    journal.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    removed: list[TimeSums] = []
    Journal(tmp_path, from_step=from_step, on_removed=removed.extend).close()
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert kept == [line for line in lines if json.loads(line)["step"] <= from_step]
    assert sum(part.steps for part in removed) == max(0, 200 - from_step)
    assert [row["step"] for row in read_rows(tmp_path, kind="eval")] == list(range(10, min(from_step, 200) + 1, 10))


def test_rows_are_kept_in_memory_while_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path, from_step=0)
    journal.write("step", 1, loss=1.0)
    with room_for((tmp_path / "metrics.jsonl").stat().st_size + 10):
        journal.write("step", 2, loss=2.0)
        journal.write("step", 3, loss=3.0)
    assert [row["step"] for row in read_rows(tmp_path)] == [1]
    assert capsys.readouterr().err.count("cannot be written") == 1
    journal.write("step", 4, loss=4.0)
    journal.close()
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3, 4]


def test_bits_per_byte_does_not_depend_on_the_tokenizer() -> None:
    # the same text and the same total of 100 nats, cut into 50 or into 25 tokens
    assert bits_per_byte(2.0, tokens=50, text_bytes=80) == pytest.approx(bits_per_byte(4.0, tokens=25, text_bytes=80))
    assert bits_per_byte(2.0, tokens=50, text_bytes=80) == pytest.approx(100 / math.log(2) / 80)
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(1e6) == math.inf


@pytest.mark.parametrize(
    ("name", "bf16", "tflops"),
    [
        ("NVIDIA H200", True, 989.4),
        ("NVIDIA H100 PCIe", True, 756.0),
        ("cpu", True, None),
        ("NVIDIA H200", False, None),
        ("NVIDIA A100-SXM4-80GB", True, 312.0),
        ("NVIDIA L40", True, None),
        ("NVIDIA H100 NVL", True, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", True, None),
    ],
)
def test_peak_flops_are_reported_for_known_devices_only(name: str, bf16: bool, tflops: float | None) -> None:
    assert peak_flops(name, bf16=bf16) == (None if tflops is None else tflops * 1e12)


@pytest.mark.integration
def test_wandb_without_a_login_records_offline_under_the_run(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch", wandb={"enabled": True, "project": "mill"})
    path = write_config(tmp_path / "c.json", config)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"HOME": str(tmp_path)}
    command = command_line("train.py", path, "run.steps=3", "scheduler=auto", processes=1)
    subprocess.run(command, check=True, capture_output=True, env=environment)
    rows = logged(tmp_path / "run")
    assert [row["train_step"] for row in rows if "loss/train" in row] == [1, 2, 3]
    assert [row["_step"] for row in rows if "loss/train" in row] == [1, 2, 3]
    assert {row["loss/train"] for row in rows if "loss/train" in row} == set(losses(tmp_path / "run").values())


def test_wandbs_own_step_is_that_of_the_run_after_a_kill_and_only_grows_after_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[tuple[int, dict[str, Any]]] = []

    class Recorded:
        def define_metric(self, *_name: str, **_options: Any) -> None: ...

        def log(self, row: dict[str, Any], *, step: int) -> None:
            rows.append((step, row))

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_settings: Recorded(), errors=None))
    sink = WandbSink(parse(WandbSection, {"enabled": True}), tmp_path, config={})  # of a run that was killed at step 9
    sink.write("event", 8, seconds=0.5)
    for step in (9, 10):
        sink.write("step", step, loss=1.0)
    sink.write("eval", 10, loss=2.0)
    sink.write("event", 9, seconds=1.0)  # of a checkpoint that took a step
    sink.write("step", 9, loss=3.0)  # after a rollback
    sink.write("step", 10, loss=4.0)
    for step in (9, 10):  # two checkpoints in the background
        sink.write("event", step, seconds=1.0)
    sink.write("step", 11, loss=5.0)
    assert [step for step, _ in rows] == [8, 9, 10, 10, 10, 11, 12, 12, 13, 14]
    assert [row.get("train_step") for _, row in rows] == [8, 9, 10, 10, None, 9, 10, None, 10, 11]
    assert rows[-2][1] == {"train_step": 10, "event/step": 10, "event/seconds": 1.0}


def test_training_continues_when_the_wandb_process_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a subprocess, since W&B starts one service for all runs of a process."""
    code = f"""
import os, signal
from pathlib import Path
from pipeline.config.load import parse
from pipeline.config.sections.deepspeed import WandbSection
from pipeline.runtime.metrics.wandb_sink import WandbSink
sink = WandbSink(parse(WandbSection, {{"enabled": True}}), Path({str(tmp_path)!r}), config={{}})
sink.write("step", 1, loss=1.0)
children = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
(service,) = [pid for pid in children if "wandb-core" in Path("/proc", pid, "cmdline").read_text()]
os.kill(int(service), signal.SIGKILL)
os.waitpid(int(service), 0)
for step in (2, 3):
    sink.write("step", step, loss=1.0)
sink.close()
os._exit(0)
"""
    monkeypatch.setenv("WANDB_MODE", "offline")
    subprocess.run([sys.executable, "-c", code], check=True)
    assert capfd.readouterr().err.count("warning: W&B cannot be reached") == 1


def test_mfu_is_that_of_palm() -> None:
    # appendix B: 45.7 % without attention, of 540.35e9 parameters at 238,300 tokens/s on 6,144 TPU v4 of 275 TFLOP/s
    assert mfu(238_300, 6 * 540.35e9, 275e12, 6144) == pytest.approx(0.457, abs=5e-4)


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
    assert shown["loss/train"] == pytest.approx(losses(tmp_path / "run"))
    assert {"optimizer/lr", "optimizer/grad_norm", "loss/held_out"} < shown.keys()
    evaluations = {row["step"]: row["loss"] for row in read_rows(tmp_path / "run", kind="eval")}
    assert shown["loss/held_out"] == pytest.approx(evaluations)


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
    assert shown == {"loss/train": {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 5: 50.0}}


def test_a_non_finite_loss_is_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(section_of(), run_dir=str(tmp_path / "run"))
    sink.write("step", 1, loss=math.nan)
    sink.close()
    assert math.isnan(scalars(tmp_path / "run/tensorboard/run")["loss/train"][1])


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


MEMORY = {"memory_allocated_bytes": int(61.2 * 2**30), "memory_reserved_bytes": 64 * 2**30}
COST = StepCost(2.0, 0.012, 1234.5, 0.41, MEMORY)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the display sees; tests move it on."""
    now = [1000.0]
    monkeypatch.setattr("pipeline.runtime.metrics.console.time.monotonic", lambda: now[0])
    return now


def test_the_smoothed_loss_begins_at_the_first_loss_and_follows_slowly() -> None:
    loss = SmoothedLoss()
    assert loss.add(8.0) == pytest.approx(8.0)
    assert loss.add(6.0) == pytest.approx((0.9 * 8 + 6) / 1.9)
    for _ in range(200):
        last = loss.add(2.0)
    assert last == pytest.approx(2.0)


def test_a_non_finite_loss_is_shown_and_does_not_spoil_the_average() -> None:
    loss = SmoothedLoss()
    loss.add(4.0)
    assert math.isnan(loss.add(math.nan))
    assert loss.add(4.0) == pytest.approx(4.0)


def test_the_time_left_counts_from_the_first_step_of_this_process(clock: list[float]) -> None:
    left = TimeLeft(1000)
    assert left.after(501) == ""  # resumed at 500; the first step compiles
    clock[0] += 20.0
    assert left.after(511) == "0:16:18"  # 2 s a step, 489 steps
    clock[0] += 2.0
    assert left.after(401) == ""  # rolled back
    clock[0] += 3600.0
    assert left.after(402) == "24 d 22:00:00"
    assert left.after(1000) == ""


def test_a_line_has_loss_gradient_norm_and_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingDisplay(first=0, total=100, shown=True) as display:
        for step in range(1, 101):
            clock[0] += 6.0
            display.step(step, loss=3.0, grad_norm=0.5, lr=1e-3, cost=COST)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == (
        "step 3/100  loss 3.0000  grad norm 0.50  lr 1.00e-03  1,234 tok/s  MFU 41.0%"
        "  mem 61.2 GiB (64.0 reserved)  data wait 0.012 s  0:09:42 left"
    )
    assert len(lines) == 51  # one in 10 s, and the last
    assert lines[-1].startswith("step 100/100")
    assert "left" not in lines[-1]


def test_the_bar_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "Console", lambda **_: terminal)
    with TrainingDisplay(first=0, total=100_000, shown=True) as display:
        for step in (99_000, 99_001):
            cost = replace(COST, tokens_per_second=123_456.0, mfu=0.415)
            display.step(step, loss=3.14159, grad_norm=12.34, lr=1e-3, cost=cost)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert re.search(r"99001/100000 loss 3.1416 gnorm 12.34 123,456 tok/s MFU 41.5% \d+:\d\d:\d\d", plain)
