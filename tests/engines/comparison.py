"""Runs layouts of an engine on several processes and compares them with one process; the tolerances."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.conftest import selected
from tests.support import output_of

FP32 = 1e-5
"""Relative, on losses and gradients: fp32 rounds at 6e-8, and few additions in another order stay far below this."""

HALF = {"bf16": 2e-3, "fp16": 5e-4}
"""Relative, on losses: half a unit of the type's last place (2^-8, 2^-11), on a few steps."""

REDUCED_IN_BF16 = 2**-8
"""Relative, on the norm of a tensor of the first gradient: every rank's gradient is rounded to bf16, and so is their
sum, each by at most 2^-9."""

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}

Layouts = Mapping[str, Mapping[str, Any]]
"""Config keys that differ from the reference, by name of the layout."""


def layout(stage: int, *, zero: Mapping[str, Any] | None = None, micro: int = 1, **keys: Any) -> dict[str, Any]:
    """A layout: the ZeRO stage, further keys of that section, and other config keys that differ from the reference."""
    return {"zero_optimization": {"stage": stage, **(zero or {})}, "train_micro_batch_size_per_gpu": micro, **keys}


def compare_layouts(work: Path, engine: str, layouts: Layouts, *, processes: int) -> dict[str, dict[str, float]]:
    """Runs layouts in one launch of so many processes: differences from the reference, by name of the layout."""
    work = work / f"on-{processes}"
    work.mkdir()
    cases = work / "cases.json"
    cases.write_text(json.dumps({name: {"engine": engine, **layout} for name, layout in layouts.items()}))
    for module, ranks in (("reference_worker", 1), ("layout_worker", processes), ("reference_worker", 1)):
        output_of(warm.run("-m", f"tests.engines.{module}", cases, work, processes=ranks, timeout_s=900))
    read: dict[str, dict[str, float]] = json.loads((work / "results.json").read_text())
    return read


def differences_fixture(test: str, layouts: Mapping[str, Mapping[int, Layouts]], needed: Collection[str] = ()) -> Any:
    """A module's fixture: runs the layouts selected for a test of it, and those of `needed`.

    `layouts`: engine -> number of processes -> layouts. The fixture is the differences by name of the layout.
    """

    @pytest.fixture(scope="module")
    def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
        wanted = {*needed, *selected(request.session, getattr(request.module, test), "name")}
        differences: dict[str, dict[str, float]] = {}
        for engine, by_processes in layouts.items():
            work = tmp_path_factory.mktemp(engine)
            for processes, each in by_processes.items():
                if chosen := {name: layout for name, layout in each.items() if name in wanted}:
                    differences |= compare_layouts(work, engine, chosen, processes=processes)
        return differences

    return found


def layout_params(always: set[str], *layouts: Mapping[str, Any], integration: Collection[str] = ()) -> list[Any]:
    """The layouts' names as test parameters: those of `always` for `make test`, others for the tier of their marker."""
    names = [name for each in layouts for name in each if name not in always]
    marks = {name: pytest.mark.integration if name in integration else pytest.mark.sweep for name in names}
    return [*sorted(always), *(pytest.param(name, marks=mark) for name, mark in marks.items())]


def assert_within_tolerance(differences: Mapping[str, float], name: str) -> None:
    """Asserts that a layout is within the tolerance of its precision, which is part of its name."""
    if "reduced in bf16" in name:
        assert 1e-4 < differences["gradient"] < REDUCED_IN_BF16  # it really was rounded
    kind = next((kind for kind in HALF if kind in name), None)
    if kind is None:
        assert differences["gradient"] < FP32
        assert differences["norm"] < 1e-4  # includes later steps, when the weights already differ by a few roundings
    assert differences["continued"] == 0
    for quantity in ("loss", "evaluation", "requests", "resumed", "resumed by the reference"):
        assert differences[quantity] < (FP32 if kind is None else HALF[kind]), quantity
