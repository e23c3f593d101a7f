"""Journals of a run of two million steps and five hundred attempts: written, resumed, summed up, drawn."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from foundation.directory import write_manifest
from pipeline.cluster.status.run import read_status
from pipeline.config.sections.deepspeed import TensorBoardSection
from pipeline.evaluation.report.command import add_arguments
from pipeline.evaluation.report.command import run as write_report
from pipeline.runtime.metrics.journal import NAME, Journal
from pipeline.runtime.metrics.tensorboard_sink import TensorBoardSink
from pipeline.runtime.metrics.times import iso_time
from tests.scale.measuring import Figures, Part, measured

STEPS, TARGET = (25_000, 50_000, 100_000, 200_000), 2_000_000
_PER_ATTEMPT = 4000
"""Steps of an attempt: 500 in two million steps."""


def write_run(steps: int, run: Path) -> Path:
    """A run's journals as the product writes them: rows of steps, an evaluation every 1,000, an attempt every 4,000."""
    run.mkdir()
    rng, start = random.Random(0), 1.7e9
    with (run / NAME).open("w") as metrics, (run / "attempts.jsonl").open("w") as attempts:
        for step in range(1, steps + 1):
            time = start + 4.0 * step
            if step % _PER_ATTEMPT == 1:
                attempt = f"a{step}"
                before = {"step": step - 1, "time": iso_time(time - 60)} if step > 1 else {}
                about = {"attempt": attempt, "world_size": 8192, "job": "7", "requeue": str(step // _PER_ATTEMPT)}
                for event, fields in (
                    ("start", {**about, "before": before}),
                    ("training", {"attempt": attempt, "step": step - 1}),
                ):
                    attempts.write(json.dumps({"event": event, "time": iso_time(time - 50), **fields}) + "\n")
                resumed = {"kind": "event", "step": step - 1, "time": iso_time(time - 40)}
                metrics.write(json.dumps({**resumed, "event": "resumed" if step > 1 else "started"}) + "\n")
            row = {
                "kind": "step",
                "step": step,
                "time": iso_time(time),
                "loss": 2.0 + 8.0 / step**0.3 + rng.random() / 50,
            }
            row |= {
                "lr": 3e-4,
                "grad_norm": 0.3 + rng.random() / 10,
                "samples": step * 4096,
                "tokens": step * 4096 * 4096,
            }
            row |= {
                "targets": 16_777_216,
                "seconds": 4.0,
                "tokens_per_second": 4.19e6,
                "mfu": 0.41,
                "data_seconds": 0.001,
            }
            row |= {"attempt": step // _PER_ATTEMPT, "host_seconds": 0.2, "memory_bytes": 6.1e10}
            metrics.write(json.dumps(row) + "\n")
            if step % 1000 == 0:
                held_out = {"kind": "eval", "step": step, "time": iso_time(time), "loss": 2.0 + 8.0 / step**0.3}
                metrics.write(json.dumps({**held_out, "perplexity": 8.0, "tokens": 1_000_000, "seconds": 8.0}) + "\n")
    write_manifest(run, kind="run", config={}, details={"steps": TARGET}, files={})
    return run


def resumed(steps: int, work: Path) -> Figures:
    """The journal is opened by a resume one step before its end."""
    run = write_run(steps, work / "run")
    with measured() as figures:
        Journal(run, from_step=steps - 1).close()
    return figures


def status(steps: int, work: Path) -> Figures:
    """`headrace status`."""
    run = write_run(steps, work / "run")
    with measured() as figures:
        found = read_status(run)
    assert found.step == steps
    assert len(found.attempts) == -(-steps // _PER_ATTEMPT)
    return figures


def report(steps: int, work: Path) -> Figures:
    """`headrace report`; the bytes are those of the page."""
    run, page, parser = write_run(steps, work / "run"), work / "report.html", argparse.ArgumentParser()
    add_arguments(parser)
    with measured() as figures:
        assert write_report(parser.parse_args([str(page), "--run", f"big={run}"])) == 0
    figures.read_bytes = page.stat().st_size
    return figures


def tensorboard(steps: int, work: Path) -> Figures:
    """Rows of steps go to TensorBoard's files; the last 500 are measured."""
    sink = TensorBoardSink(TensorBoardSection(enabled=True, output_path=str(work)), run_dir=str(work / "run"))

    def write(first: int, last: int) -> None:
        for step in range(first, last):
            sink.write("step", step, loss=2.5, lr=3e-4, grad_norm=0.3, tokens_per_second=4e6, mfu=0.4)

    write(1, steps - 500)
    with measured() as figures:
        write(steps - 500, steps)
    sink.close()
    return figures


PARTS = [
    Part(
        "journals: resume",
        "the metrics' journal is opened by a resume one step before its end.",
        "steps",
        STEPS,
        TARGET,
        resumed,
    ),
    Part("journals: status", "`headrace status` sums the steps of all attempts.", "steps", STEPS, TARGET, status),
    Part("journals: report", "`headrace report`; bytes read are the page's size.", "steps", STEPS, TARGET, report),
    Part(
        "journals: TensorBoard",
        "rows of 500 steps, five scalars each, are written to event files after this many steps.",
        "steps",
        (1000, 2000, 4000, 8000),
        TARGET,
        tensorboard,
    ),
]
