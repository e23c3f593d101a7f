"""Masks: two zeros in any four, or a share; the weights of the highest score stay, untouched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.compress.pruning.config import MaskSection
from pipeline.compress.pruning.gathering import find_importance
from pipeline.compress.pruning.masks import mask_of
from pipeline.runtime.launch.environment import SINGLE_PROCESS
from tests.compress.pruning import models
from tests.compress.pruning.prunings import pruned


def test_2_4_keeps_the_two_of_four_with_the_highest_score() -> None:
    weight = torch.tensor([[3.0, -4.0, 1.0, 2.0, 0.1, 0.2, -0.4, 0.3]])
    section = MaskSection(pattern="2:4", method="magnitude")
    assert mask_of(weight, section, None).int().tolist() == [[1, 1, 0, 0, 0, 0, 1, 1]]
    wanda = MaskSection(pattern="2:4")
    moments = torch.tensor([0.0, 1, 100, 1, 1, 1, 1, 1]).double()
    assert mask_of(weight, wanda, moments).int().tolist() == [[0, 1, 1, 0, 0, 0, 1, 1]]


def test_magnitude_compares_within_the_matrix_and_wanda_within_a_row() -> None:
    weight = torch.tensor([[1.0, 2.0], [30.0, 40.0]])
    assert mask_of(weight, MaskSection(pattern="unstructured", method="magnitude"), None).tolist() == [
        [False, False],
        [True, True],
    ]
    ones = torch.ones(2).double()
    assert mask_of(weight, MaskSection(pattern="unstructured"), ones).tolist() == [[False, True], [False, True]]


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_masks_are_on_what_is_left_after_cutting(tokens: Path, tmp_path: Path, name: str) -> None:
    source = models.make(tmp_path / "model", name, tokens, dead=False)
    shape = {"hidden_size": 16, "intermediate_size": 24}
    plan, kept = pruned(tmp_path, source, tokens, target={"shape": shape}, experimental={"pattern": "2:4"})
    found, before = load_file(plan.output / "model.safetensors"), load_file(source / "model.safetensors")
    matrices = [key for key in found if "_proj.weight" in key or ".experts." in key]
    assert len(matrices) >= 7 * 3
    for key in matrices:
        zeros = (found[key].view(found[key].shape[0], -1, 4) == 0).sum(-1)
        assert torch.equal(zeros, torch.full_like(zeros, 2)), key
    assert (found["model.embed_tokens.weight"][1:] != 0).all()  # but for the row of padding
    # Wanda's score of one row, from the sums themselves
    key, sums = "model.layers.0.self_attn.q_proj.weight", find_importance(plan, SINGLE_PROCESS).sums
    row = before[key][0, kept.hidden].double()
    score = row.abs() * sums["model.layers.0.input_layernorm.out.square"][kept.hidden].sqrt()
    best = score.view(-1, 4).topk(2, dim=1).indices.sort(1).values
    assert found[key][0].view(-1, 4).nonzero()[:, 1].view(-1, 2).tolist() == best.tolist()
    assert torch.equal(found[key][0][found[key][0] != 0], row[found[key][0] != 0].float())
