"""A model, and runs that are written down without being trained, with made-up numbers."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from foundation.directory import write_manifest
from pipeline.runtime.metrics.journal import Journal
from pipeline.runtime.metrics.times import iso_time
from tests.evaluation.heldout.small import make_model

TOKENS_PER_STEP, SECONDS_PER_STEP = 1000, 0.5


def make_run(
    path: Path,
    *,
    steps: int,
    distilled: bool = False,
    planned: int | None = None,
    details: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Writes manifest.json and metrics.jsonl of a run whose loss falls from about 6 to 2; `planned` steps, if more."""
    path.mkdir(parents=True)
    made_with = {"engine": "deepspeed", "zero_optimization": {"stage": 2}, "run": {"seed": 11}, **config}
    parents = {"data.sources.0": {"path": "out/tokens", "fingerprint": "0123456789abcdef" * 4}}
    state = {"step": steps, "steps": planned or steps, "finished": planned is None}
    write_manifest(path, kind="run", config=made_with, parents=parents, details={**state, **(details or {})})
    journal = Journal(path, from_step=0)
    began = time.time() - SECONDS_PER_STEP * steps  # rows that are written in one millisecond would take no time
    journal.write("event", 0, time=iso_time(began), event="started", world_size=2)
    for step in range(1, steps + 1):
        loss = 2 + 4 * math.exp(-5 * step / steps) + 0.05 * math.sin(step)
        parts = {"cross_entropy": loss, "kl": loss / 4} if distilled else {}
        # a distilled run's loss is a mixture: far from the cross-entropy, so that a mix-up shows
        journal.write("step", step, **_row(step, loss=10 * loss if distilled else loss), **parts)
        if step % 10 == 0:
            journal.write("eval", step, loss=loss + 0.1, perplexity=math.exp(loss + 0.1), bits_per_byte=loss / 3)
    journal.close()
    return path


def _row(step: int, *, loss: float) -> dict[str, float]:
    count = {"samples": 4 * step, "tokens": TOKENS_PER_STEP * step}
    speed = {"seconds": SECONDS_PER_STEP, "tokens_per_second": 2000}
    return {**count, "loss": loss, "lr": 1e-3 / step, "grad_norm": 1 / step, **speed}


@pytest.fixture(scope="session")
def model(tokens: Path) -> Path:
    return make_model(tokens.parent / "report/model", tokens, steps=10)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=40)
