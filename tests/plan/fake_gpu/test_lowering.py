"""Compiled layers are lowered for a GPU without one: graphs, and kernels for Hopper and Blackwell."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from pipeline.plan.fake_gpu import guard
from tests.conftest import ROOT
from tests.plan.fake_gpu.cells import GATHERED
from tests.plan.fake_gpu.roofline import KEPT, measure
from tests.support import output_of

SHARED_MEMORY = 227 * 2**10
"""Bytes of shared memory that a block may have on Hopper and Blackwell."""
NO_TRITON = "Triton is not installed (pip install triton==3.7.1 --constraint constraints.txt)"
LENGTH, BLOCK = 65_536, 128
"""Tokens of a packed sequence, and of a block of its mask."""

pytestmark = [
    pytest.mark.skipif(guard.missing() is not None, reason=guard.missing() or ""),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NO_TRITON),
    pytest.mark.integration,
]


def lowered_again(row: str) -> list[dict[str, Any]]:
    """The graphs of a row, which are the committed ones and whose kernels are built."""
    graphs = measure(row)
    committed = json.loads(KEPT.read_text())[row]
    assert graphs == committed, f"if it is meant: python -m tests.plan.fake_gpu.roofline_page '{row}'\n{graphs}"
    for graph in graphs:
        assert graph["cubins"] == {"90": graph["kernels"], "100": graph["kernels"]}
        assert graph["shared_memory"] <= SHARED_MEMORY
    return graphs


@pytest.mark.parametrize("row", ["llama_8b_h200.json, nothing recomputed", "llama_8b_8gpu.json, as shipped"])
def test_layers_are_two_graphs_whose_kernels_are_built_for_hopper_and_blackwell(row: str) -> None:
    layers = [graph for graph in lowered_again(row) if graph["part"] == "layers"]
    assert sorted(graph["backward"] for graph in layers) == [False, True]
    assert {graph["calls"] for graph in layers} == {2}  # both layers have the same graphs


@pytest.mark.parametrize(
    "row", ["llama_70b_fsdp_3d.json, as shipped", f"{GATHERED}, nothing recomputed"], ids=["tp", "experts"]
)
def test_layers_with_tensor_parallelism_or_experts_have_kernels_for_hopper_and_blackwell(row: str) -> None:
    layers = [graph for graph in lowered_again(row) if graph["part"] == "layers"]
    assert {graph["backward"] for graph in layers} == {False, True}


@pytest.mark.parametrize("window", [None, 4096], ids=["documents", "documents, window and rule"])
def test_attention_over_64k_packed_tokens_has_kernels_for_hopper_and_no_tensor_of_s_x_s(window: int | None) -> None:
    command = [sys.executable, "-m", "tests.plan.fake_gpu.flex", str(LENGTH), *([str(window)] if window else [])]
    said = output_of(
        subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), check=False)
    )
    found = json.loads(said.splitlines()[-1])
    forward, backward = found["graphs"]
    assert (forward["backward"], backward["backward"]) == (False, True)
    for graph in (forward, backward):
        assert graph["cubins"] == graph["kernels"] >= 1
        assert graph["shared_memory"] <= SHARED_MEMORY
        assert any("flex_attention" in name for name in graph["sources"])
        assert graph["largest"] == 32 * LENGTH * 128  # one of the size of the queries: heads x tokens x head size
    blocks = LENGTH // BLOCK
    assert found["mask"] < 2 * blocks**2  # a table of blocks by blocks, and a few numbers
