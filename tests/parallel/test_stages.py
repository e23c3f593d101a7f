"""Pipeline stages are balanced by cost, and run in sequence they equal the full model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ConfigError
from pipeline.engines.objective import CrossEntropy
from pipeline.parallel.assemble import LocalModel, assemble
from pipeline.parallel.costs import describe_stages, forward_flops
from pipeline.parallel.partition import pipeline_stages
from pipeline.parallel.stages import split_layers
from tests.models.architectures import assert_same, batch_of, gradients, meta_of
from tests.parallel.layouts import T, Z, fill_weights, full_model_gradients, resolved

BORDERS = ((3, 7, 8, 19, 24), (13,))


@settings(max_examples=80, deadline=None)
@given(costs=st.lists(st.floats(0.1, 10), min_size=1, max_size=8), head=st.floats(0, 20), stages=st.integers(1, 8))
def test_the_split_is_optimal(costs: list[float], head: float, stages: int) -> None:
    if stages > len(costs):
        with pytest.raises(ConfigError, match=f"use at most {len(costs)}"):
            split_layers(costs, head=head, stages=stages)
        return
    found = split_layers(costs, head=head, stages=stages)
    best = min(
        max(sum(costs[a:b]) + (head if b == len(costs) else 0.0) for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    assert max(stage.cost for stage in found) == pytest.approx(best)
    assert [n for stage in found for n in range(*stage.layers)] == list(range(len(costs)))
    assert sum(stage.cost for stage in found) == pytest.approx(sum(costs) + head)


def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    assert [s.layers for s in split_layers([1.0] * 8, head=3.0, stages=2)] == [(0, 5), (5, 8)]


def test_sliding_windows_and_inactive_experts_cost_less() -> None:
    sliding, full, again = forward_flops(meta_of("gemma3_text"), sequence_length=4096)[0]
    assert sliding == again < full
    windowed, plain = (forward_flops(meta_of(name), sequence_length=4096)[0][0] for name in ("mistral", "llama"))
    assert windowed < plain
    all_experts, two = (forward_flops(meta_of("mixtral", num_experts_per_tok=n), sequence_length=T)[0] for n in (4, 2))
    assert two[0] < 0.7 * all_experts[0]


def in_stages(name: str, pp: int, borders: Any, **fields: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the stages run in sequence; gradients of tied weights are summed."""
    run = resolved(world_size=pp, parallel={"pp": pp})
    model = meta_of(name, **fields)
    parts: list[LocalModel] = [assemble(run, model, None, stage=stage) for stage in pipeline_stages(run, model)]
    batch = batch_of(length=T, borders=borders)
    passed: tuple[torch.Tensor, ...] = (batch.input_ids,)
    for part in parts:
        fill_weights(part, model)
        passed = part.decoder(passed[0], batch, CrossEntropy(z_loss=Z))
    passed[0].backward()
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for key, gradient in gradients(part.decoder).items():
            assert (key in found) <= (key in part.tied)
            found[key] = found[key] + gradient if key in found else gradient
    return float(passed[0].detach()), found


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3", "mistral", "gemma", "gemma3_text", "mixtral"])
def test_stages_in_sequence_equal_the_full_model(name: str, pp: int) -> None:
    loss, expected = full_model_gradients(name, BORDERS)
    found, theirs = in_stages(name, pp, BORDERS)
    assert found == pytest.approx(loss, rel=1e-5)
    assert_same(theirs, expected)


def test_every_stage_is_described_with_its_layers_and_parameters() -> None:
    run, model = resolved(world_size=2, parallel={"pp": 2}), meta_of("llama_tied")
    lines = describe_stages(model, pipeline_stages(run, model))
    assert len(lines) == 2
    assert "layers 0-1" in lines[0]
    assert "embedding" in lines[0]
    assert "head" in lines[1]
    # the tied embedding is in both stages: 96 x 32 parameters more than the model has
    counts = [int(line.split(" parameters")[0].split()[-1].replace(",", "")) for line in lines]
    assert sum(counts) == sum(p.numel() for p in model.parameters()) + 96 * 32


def test_an_architecture_without_a_pipeline_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="no base_model_pp_plan for gpt2"):
        pipeline_stages(resolved(world_size=2, parallel={"pp": 2}), meta_of("gpt2"))
