"""Running layouts of an engine on processes, and how far they may be from one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.conftest import selected

FP32 = 1e-5
"""Relative, on losses and gradients: fp32 rounds at 6e-8, and so few additions in another order stay far below this."""

HALF = {"bf16": 2e-3, "fp16": 5e-4}
"""Relative, on losses: half a unit of the type's last place (2^-8, 2^-11), on a few steps."""

Layouts = Mapping[str, Mapping[str, Any]]
"""What differs from a plain run, by the layout's name."""


def layout(stage: int, *, zero: Mapping[str, Any] | None = None, micro: int = 1, **keys: Any) -> dict[str, Any]:
    """A layout: a ZeRO stage, more of that section, and the keys that differ from a plain run."""
    return {"zero_optimization": {"stage": stage, **(zero or {})}, "train_micro_batch_size_per_gpu": micro, **keys}


def compare_layouts(work: Path, engine: str, layouts: Layouts, *, processes: int) -> dict[str, dict[str, float]]:
    """Runs layouts in one go of so many processes: differences from the reference, by the layout's name."""
    work = work / f"on-{processes}"
    work.mkdir()
    given = work / "cases.json"
    given.write_text(json.dumps({name: {"engine": engine, **layout} for name, layout in layouts.items()}))
    for module, ranks in (("plain", 1), ("trial", processes), ("plain", 1)):
        done = warm.run("-m", f"tests.engines.{module}", given, work, processes=ranks, timeout_s=900)
        assert done.returncode == 0, done.stderr[-4000:]
    read: dict[str, dict[str, float]] = json.loads((work / "results.json").read_text())
    return read


def compare_selected(
    request: pytest.FixtureRequest, work: Path, engine: str, test: Any, always: set[str], layouts: Mapping[int, Layouts]
) -> dict[str, dict[str, float]]:
    """Runs the layouts that this session asks of `test`, and those of every day; `layouts` by number of processes."""
    wanted = always | set(selected(request.session, test, "name"))
    differences: dict[str, dict[str, float]] = {}
    for processes, each in layouts.items():
        chosen = {name: layout for name, layout in each.items() if name in wanted}
        differences |= compare_layouts(work, engine, chosen, processes=processes)
    return differences


def layout_params(always: set[str], *layouts: Layouts) -> list[Any]:
    """The layouts' names as a test's parameters: those that run every day, the others with `make test-matrix`."""
    names = [name for each in layouts for name in each]
    return [pytest.param(name, marks=[] if name in always else pytest.mark.matrix) for name in names]


def assert_within_tolerance(differences: Mapping[str, float], name: str) -> None:
    """Asserts that a layout is within the tolerance of its precision, which its name tells."""
    kind = next((kind for kind in HALF if kind in name), None)
    if kind is None:
        assert differences["gradient"] < FP32
        assert differences["norm"] < 1e-4  # of later steps too, when the weights differ by a few roundings already
    for what in ("loss", "evaluation", "resumed", "resumed by the reference"):
        assert differences[what] < (FP32 if kind is None else HALF[kind]), what
