"""Trains one family under the layouts of the sweep, exports it, loads it again and compares its loss."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm
from tests.conftest import start, tiny_config, write_config
from tests.sweeps.families import tiny_fields

LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"zero_optimization": {"stage": 1}},
    "ZeRO-3": {"zero_optimization": {"stage": 3}},
    "FSDP2": {"engine": "torch", "zero_optimization": {"stage": 3}},
}
"""Each on two processes."""

FURTHER: dict[str, dict[str, Any]] = {
    "cp 2": {"engine": "torch", "zero_optimization": {"stage": 3}, "parallel": {"cp": 2}},
    "layers dropped": {"engine": "torch", "zero_optimization": {"stage": 3}},
}
"""What a family may be refused: with the sequence divided, of which the held-out loss is that of the others; and layers
0, 2 and 3 of the model that was exported."""
KEPT = [0, 2, 3]

STEPS, SAMPLES, LENGTH = 3, 16, 32
TOLERANCE = 1e-4
"""Of the held-out loss in nats, fp32: another order of summation differs by 1e-6, one wrong tensor by 1e-3 and more."""


@dataclass(frozen=True)
class FamilyResult:
    """What became of a family.

    Attributes:
        trained: under every layout, and its exports have the losses of the runs; and under those of `FURTHER`, or
            refused.
        note: the attention and losses; or the refusal or failure.
    """

    trained: bool
    note: str


def run_family(
    kind: str, tokens: Path, work: Path, *, layouts: dict[str, dict[str, Any]] | None = None
) -> FamilyResult:
    """Runs the cell of a family. An attention that headrace refuses is replaced by eager, as its message asks.

    Args:
        kind: `model_type`.
        tokens: a dataset with a tokenizer of 512 ids.
        work: an empty directory.
        layouts: names in `LAYOUTS` and `FURTHER`; None for all, in their order.
    """
    attention, notes, known = "sdpa", [], 0.0
    for name, fields in (layouts or LAYOUTS | FURTHER).items():
        folder = work / name
        folder.mkdir(parents=True)
        model: dict[str, Any] = {"config": tiny_fields(kind), "attn_implementation": attention}
        if name == "layers dropped":
            model = {"path": str(_exported(work)), "keep_layers": KEPT, "attn_implementation": attention}
        done = _train(folder, tokens, model, fields)
        if done.returncode == 2 and name in FURTHER:
            notes.append(f"{name} {failure(name, 2, done.stdout)}")
            continue
        if done.returncode == 2 and "eager" in done.stdout and attention == "sdpa":
            attention = model["attn_implementation"] = "eager"
            done = _train(folder, tokens, model, fields)
        if done.returncode:
            return FamilyResult(False, failure(name, done.returncode, done.stdout))
        trained, exported = _losses(folder, tokens)
        if isinstance(exported, str):
            return FamilyResult(False, f"{name}: {exported}")
        if not abs(trained - exported) <= TOLERANCE:
            return FamilyResult(False, f"{name}: held-out loss {trained:.5f}, of the reloaded export {exported:.5f}")
        if name == "cp 2" and known and not abs(trained - known) <= TOLERANCE:
            return FamilyResult(False, f"{name}: held-out loss {trained:.5f}, without it {known:.5f}")
        known = trained
        notes.append(f"{name} {trained:.4f}")
    return FamilyResult(True, f"{attention}; {', '.join(notes)}")


def _exported(work: Path) -> Path:
    """The export of an earlier layout."""
    return next(path for path in sorted(work.glob("*/model")))


def _train(folder: Path, tokens: Path, model: dict[str, Any], fields: dict[str, Any]) -> Any:
    config = tiny_config(tokens, folder / "run", model=model, evaluation={"samples": SAMPLES}, **fields)
    config["data"]["sequence_length"] = LENGTH
    config["run"] |= {"steps": STEPS, "checkpoint_every": STEPS}
    config.pop("scheduler")
    try:
        return start("train.py", write_config(folder / "config.json", config), processes=2, timeout=120)
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(late.cmd, 124, stdout=f"{late.output}\nTimeoutError: after {late.timeout} s")


def _losses(folder: Path, tokens: Path) -> tuple[float, float | str]:
    """The held-out losses of the run and of its reloaded export; of the latter, why there is none."""
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    trained = next(float(row["loss"]) for row in rows if row["kind"] == "eval")
    model = folder / "model"
    done = warm.run("-m", "pipeline", "export", folder / "run", model, merged=True)
    if done.returncode:
        return trained, failure("export", done.returncode, done.stdout)
    options = ("--sequence-length", LENGTH, "--max-tokens", SAMPLES * LENGTH, "--json")
    done = warm.run("-m", "pipeline", "eval", model, "--data", tokens, *options)
    if done.returncode:
        return trained, failure("eval", done.returncode, done.stderr)
    return trained, float(json.loads(done.stdout.splitlines()[-1])["loss_nats"])


def failure(what: str, code: int, output: str) -> str:
    """One line: a refusal with its reason, or the last line of what was printed."""
    why = re.search(r"^\s*why: (.+)$", output, re.MULTILINE)
    if code == 2 and why:
        return f"refused: {why[1].strip()}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(\[rank\d\]: )?[\w.]*(Error|Exception)\b", line)]
    return f"{what} ended with code {code}: {(named or lines or ['-'])[-1][:200]}"
