"""Compiled layers are lowered for a GPU without one: graphs, kernels for Hopper and Blackwell, the roofline."""

from __future__ import annotations

import importlib.util
import json

import pytest

from pipeline.fake_gpu import guard
from tests.fake_gpu.roofline import GPUS, KEPT, PAGE, ROWS, cases, least_time, measure, model_flops, page

SHARED_MEMORY = 227 * 2**10
"""Bytes of shared memory that a block may have on Hopper and Blackwell."""
NO_TRITON = "Triton is not installed (pip install triton==3.7.1 --constraint constraints.txt)"


@pytest.mark.skipif(guard.missing() is not None, reason=guard.missing() or "")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NO_TRITON)
@pytest.mark.integration
@pytest.mark.parametrize("row", ["llama_8b_h200.json, nothing recomputed", "llama_8b_8gpu.json, as shipped"])
def test_layers_are_two_graphs_whose_kernels_are_built_for_hopper_and_blackwell(row: str) -> None:
    graphs = measure(cases()[row])
    committed = json.loads(KEPT.read_text())[row]
    assert graphs == committed, f"if it is meant: python -m tests.fake_gpu.roofline\n{graphs}"
    layers = [graph for graph in graphs if graph["products"]]  # the loss has none
    assert sorted(graph["backward"] for graph in layers) == [False, True]
    assert {graph["calls"] for graph in layers} == {2}  # both layers have the same graphs
    for graph in graphs:
        assert graph["cubins"] == {"90": graph["kernels"], "100": graph["kernels"]}
        assert graph["shared_memory"] <= SHARED_MEMORY


def test_the_page_has_the_roofline_of_the_committed_kernels() -> None:
    kept = json.loads(KEPT.read_text())
    assert list(kept) == list(ROWS)
    text = PAGE.read_text()
    assert page(text, kept) == text, "run: python -m tests.fake_gpu.roofline"


def test_a_roofline_without_recomputation_is_that_of_the_model_s_products() -> None:
    row = "llama_8b_h200.json, nothing recomputed"
    flops, bandwidth = GPUS["H200"]
    time = least_time(row, json.loads(KEPT.read_text())[row], flops=flops, bandwidth=bandwidth)
    assert time.products == pytest.approx(model_flops(row, halves=1) / flops, rel=0.02)
    assert time.fused < 0.1 * time.products
