"""The checks of `make guard`. Each returns a remark, and raises AssertionError where something has changed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.plan.proof.tokens import write_tokens
from pipeline.plan.proof.tolerance import LOSS_FP32
from pipeline.runtime.metrics.attempts_journal import read_events
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import ROOT, launch, losses, tiny_config, write_config
from tests.guard import begun
from tests.run.test_kill_resume import deepspeed, kill_at_step

EXPECTED = Path(__file__).with_name("expected.json")
CELLS = Path(__file__).with_name("cells.txt")
_STEPS = 11
"""Of the README's command: 4 or a little more, killed; to 8 on one rank; to 11 with the other engine."""


def readme_command(work: Path) -> dict[str, Any]:
    """Losses of the README's command, killed; resumed on one rank; resumed with the other engine."""
    write_tokens(work / "tokens", vocab_size=512, tokens=4_000, longest=200)
    config = write_config(work / "c.json", {"extends": str(ROOT / "ds_configs/zero3.json")})
    sets = (
        f"data.sources.0.path={work / 'tokens'}",
        f"run.dir={work / 'run'}",
        "data.sequence_length=64",
        "run.checkpoint_every=3",
        "run.async_checkpoints=false",  # that of step 3 is whole when step 4 is in the journal
        "scheduler.params.warmup_num_steps=2",
        f"scheduler.params.total_num_steps={_STEPS + 1}",
        "evaluation.every=3",
        "evaluation.samples=16",
    )
    kill_at_step(deepspeed(config, *sets, f"run.steps={_STEPS}"), work / "run", 4)
    for steps, engine in ((8, "deepspeed"), (_STEPS, "torch")):
        said = launch("train.py", config, *sets, f"run.steps={steps}", f"engine={engine}")
        assert "resuming after step" in said, said[-4000:]
    heldout = {row["step"]: row["loss"] for row in read_rows(work / "run", kind="eval")}
    return {"losses": losses(work / "run"), "heldout": heldout}


def begun_run(work: Path) -> str:
    """A run that the commit before the issue began goes on to the last bit."""
    with tarfile.open(begun.ARCHIVE) as archive:
        archive.extractall(work, filter="data")
    folder = work / "begun"
    facts = json.loads((folder / "facts.json").read_text())
    said = launch("train.py", folder / "config.json", processes=2)
    assert f"resuming after step {begun.HALF}" in said, said
    same = {key: facts[key] for key in begun.machine()} == begun.machine()
    compare("loss of step", losses(folder / "run"), facts["losses"], tolerance=0.0 if same else LOSS_FP32)
    where = "bit for bit" if same else f"to {LOSS_FP32:g}: it was begun on {facts['processor']}, torch {facts['torch']}"
    return f"begun by {facts['commit'][:8]}, {where}"


def loop_rows(work: Path) -> dict[str, Any]:
    """Names and order of rows and events of a run with every feature of the loop on."""
    for name, longest in (("calm", 64), ("wild", 2)):  # the step that is all ends of documents has a spike
        write_tokens(work / name, vocab_size=64, tokens=6_000, longest=longest)
    config = tiny_config(work / "calm", work / "run", **_LOOP)
    config["model"]["config"] |= {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    weights = [{"after_step": at, "weights": {"calm": 1, "wild": wild}} for at, wild in ((0, 0), (20, 99), (21, 0))]
    sources = [{"path": str(work / name), "name": name} for name in ("calm", "wild")]
    config["data"] |= {"sources": sources, "curriculum": weights, "mask_documents": True}
    config["run"] |= {"steps": 26, "keep_every": 12, "in_memory_checkpoints": str(work)}
    path = write_config(work / "c.json", config)
    launch("train.py", path, processes=2)
    launch("train.py", path, "run.steps=30", "loss.z_loss=0", 'run.allow_change=["loss.z_loss"]')
    rows = read_rows(work / "run")
    # checkpoints are written beside the steps: between which of them one is finished depends on the disk
    beside = [row for row in rows if str(row.get("event")).startswith("checkpoint")]
    steps = [row for row in rows if row not in beside]
    attempts, _ = read_events(work / "run")
    return {
        "rows": [f"{name} {at}" for name, at in spans((_name(row), row["step"]) for row in steps)],
        "checkpoints": [f"{_name(row)} {row['step']}" for row in beside],
        "attempts": [row["event"] for row in attempts],
        "columns": columns([*rows, *attempts]),
    }


_LOOP: dict[str, Any] = {
    "engine": "torch",
    "scheduler": {"type": "WSD", "params": {"warmup_num_steps": 3, "decay_num_steps": 5, "total_num_steps": 40}},
    "loss": {"z_loss": 1e-4, "chunk": 16},
    "moe": {"balance": "aux_loss"},
    "evaluation": {"every": 5, "samples": 8},
    "anomalies": {"spikes": "rollback", "window": 16, "deviations": 1.0, "check_replicas": 10},
    "stragglers": {"every": 10},
    "profile": {"steps": [3, 4]},
}


def cells(work: Path) -> str:
    """The parity cells of `cells.txt`, which carry the marker `sweep`: CI runs them nowhere else."""
    named = [line for line in CELLS.read_text().splitlines() if line and not line.startswith("#")]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "sweep", f"--basetemp={work / 'cells'}", *named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(rf"\b{len(named)} passed", done.stdout), (
        f"not all {len(named)} carry the marker: {done.stdout[-500:]}"
    )
    return f"{len(named)} cells"


def compare(what: str, found: Mapping[int, float], stored: Mapping[str, float], *, tolerance: float) -> None:
    """Raises AssertionError for values that differ from the stored ones by more than a relative tolerance."""
    assert [str(step) for step in found] == list(stored), f"{what}s: {list(found)}, stored: {', '.join(stored)}"
    wrong = [
        f"{what} {step}: {value!r}, stored {stored[str(step)]!r}"
        for step, value in found.items()
        if not math.isclose(value, stored[str(step)], rel_tol=tolerance, abs_tol=0.0)
    ]
    assert not wrong, "\n".join(wrong)


def spans(rows: Iterable[tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """Rows of one name that follow each other, as a name and its first and last step."""
    for name, group in groupby(rows, key=lambda row: row[0]):
        steps = [step for _, step in group]
        assert steps == list(range(steps[0], steps[0] + len(steps))), f"rows {name} of steps {steps}"
        yield name, str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Name of a row -> the columns of its rows, each set of them once, in order."""
    found: dict[str, list[str]] = {}
    for row in rows:
        texts = found.setdefault(_name(row), [])
        text = " ".join(key for key in row if key not in ("kind", "event", "step", "time"))
        if text not in texts:
            texts.append(text)
    return found


def _name(row: Mapping[str, Any]) -> str:
    kind = row.get("kind", "attempt")
    return f"{kind} {row['event']}" if "event" in row else str(kind)


STORED: dict[str, Callable[[Path], dict[str, Any]]] = {"readme_command": readme_command, "loop_rows": loop_rows}
"""Checks whose result is compared with `expected.json`; the others look for themselves."""
OTHERS: dict[str, Callable[[Path], str]] = {"begun_run": begun_run, "cells": cells}


def against_stored(name: str, found: Mapping[str, Any]) -> str:
    """Compares the result of a check with the stored one; raises AssertionError with the first difference."""
    stored = json.loads(EXPECTED.read_text())[name]
    for key, value in found.items():
        if key in ("losses", "heldout"):
            compare(f"{key} of step", value, stored[key], tolerance=LOSS_FP32)
        elif value != stored[key]:
            assert json.loads(json.dumps(value)) == stored[key], _difference(key, value, stored[key])
    return f"to {LOSS_FP32:g}" if "losses" in found else "names and order"


def _difference(key: str, found: Any, stored: Any) -> str:
    pairs = zip(*(list(each.items()) if isinstance(each, dict) else each for each in (found, stored)), strict=False)
    first = next((f"{left!r}, stored {right!r}" for left, right in pairs if left != right), "")
    return f"{key}: {first or f'{len(found)} entries, stored {len(stored)}'}"
