"""Cutting what does nothing changes nothing, in every architecture, along every axis; the folder is a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compress.pruning.search import Choices, search
from pipeline.models.folder.loading import load_model
from pipeline.models.folder.model_folder import ModelFolder
from tests.compress.pruning import models
from tests.compress.pruning.conftest import as_rows, indices, pruned
from tests.compress.pruning.models import DEAD_EXPERT, DEAD_FFN, DEAD_GROUP, DEAD_HIDDEN, DEAD_LAYER

DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")
AXES: dict[str, dict[str, int]] = {
    "hidden": {"hidden_size": 24},
    "ffn": {"intermediate_size": 32},
    "groups": {"num_key_value_heads": 1},
    "layers": {"num_hidden_layers": 2},
}
ALL = {key: size for axis in AXES.values() for key, size in axis.items()}
CELLS = [
    *((name, "all", ALL) for name in DENSE),
    *(("llama", axis, shape) for axis, shape in AXES.items()),
    ("mixtral", "all", {**ALL, "num_experts": 3}),
    (
        "qwen3_moe",
        "all",
        {**{k: v for k, v in ALL.items() if k != "intermediate_size"}, "num_experts": 3, "moe_intermediate_size": 32},
    ),
    ("gpt2", "ffn", {"intermediate_size": 32}),
    ("gpt2", "heads", {"num_key_value_heads": 3}),
    ("gpt2", "all", {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}),
]
CHOICES = Choices({"a": 96, "b": 40, "c": 7}, {"a": [32, 64, 96], "b": [10, 20, 30, 40]})


@pytest.fixture(scope="module")
def made(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")

    def of(name: str) -> Path:
        return folder / name if (folder / name).exists() else models.make(folder / name, name, tokens)

    return of


IDS = [f"{name}-{axis}" for name, axis, _ in CELLS]


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, _, shape in CELLS], ids=IDS)
def test_cutting_what_does_nothing_changes_nothing(
    made: Any, tokens: Path, tmp_path: Path, name: str, shape: dict[str, int]
) -> None:
    source = made(name)
    plan, kept = pruned(tmp_path, source, tokens, target={"shape": shape})
    before, after = (models.logits(folder, models.rows()) for folder in (source, plan.output))
    # in fp64 from weights of fp32, of which the norms' are multiplied by the root of 32 / 24
    assert (after - before).abs().max() / before.std() < 2e-5
    result = ModelFolder.open(plan.output)
    assert result.parameters == plan.anatomy.parameters(plan.shape)
    assert result.parameters < plan.source.parameters
    if "hidden_size" in shape:
        assert as_rows(kept.hidden) == indices(DEAD_HIDDEN, models.HIDDEN)
    if "num_hidden_layers" in shape:
        assert as_rows(kept.layers) == [n for n in range(models.LAYERS) if n != DEAD_LAYER]
    if "num_key_value_heads" in shape:
        alive = tuple(n for n in range(plan.anatomy.sizes["num_key_value_heads"]) if n != DEAD_GROUP)
        assert {tuple(as_rows(each)) for each in kept.groups.values()} == {alive}
    used = {place: each for place, each in kept.ffn.items() if place[1] != DEAD_EXPERT}  # which is cut as a whole
    assert all(as_rows(each) == indices(DEAD_FFN, models.FFN) for each in used.values())
    assert all(
        as_rows(each) == [n for n in range(models.EXPERTS) if n != DEAD_EXPERT] for each in kept.experts.values()
    )
    load_model(plan.output)  # refuses missing and unexpected tensors


def test_gpt2_loses_heads_with_its_hidden_size_and_its_config_says_so(made: Any, tokens: Path, tmp_path: Path) -> None:
    plan, _ = pruned(tmp_path, made("gpt2"), tokens, target={"parameters": 28_000}, axes=["hidden_size"])
    found = models.config_json(plan.output)
    assert found["n_embd"] == 8 * found["n_head"] < models.HIDDEN
    assert ModelFolder.open(plan.output).parameters <= 28_000


LAYERS_OF_QWEN = {"num_hidden_layers": 6, "mlp_only_layers": [2], "decoder_sparse_step": 2}


"""Layers 1, 3 and 5 have experts, 0, 2 and 4 none: what a step of two and a list give."""


@pytest.mark.parametrize("lists", [{}, {"mlp_only_layers": [0, 3], "decoder_sparse_step": 1}], ids=["step", "list"])
def test_layers_of_qwen_moe_stay_dense_or_sparse_in_a_cut(tokens: Path, tmp_path: Path, lists: dict[str, Any]) -> None:
    source = models.make(tmp_path / "mixed", "qwen3_moe", tokens, dead=False, **{**LAYERS_OF_QWEN, **lists})
    plan, kept = pruned(tmp_path, source, tokens, target={"shape": {"num_hidden_layers": 4}})
    left = as_rows(kept.layers)
    assert len(left) == 4
    before = models.logits(source, models.rows(), without=[n for n in range(6) if n not in left])
    assert (models.logits(plan.output, models.rows()) - before).abs().max() == 0
    dense = {
        n for n in range(6) if not any(t.layer == n and t.expert is not None for t in plan.anatomy.tensors.values())
    }
    assert models.config_json(plan.output)["mlp_only_layers"] == [left.index(n) for n in left if n in dense]
    load_model(plan.output)  # refuses missing and unexpected tensors


def test_a_folder_of_several_files_stays_one(tokens: Path, tmp_path: Path) -> None:
    source = models.make(tmp_path / "whole", "mixtral", tokens)
    sharded = tmp_path / "sharded"
    model = load_model(source)
    model.save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    found = []
    for folder in (source, sharded):
        work = tmp_path / f"of-{folder.name}"
        work.mkdir()
        plan, _ = pruned(work, folder, tokens, target={"shape": {"hidden_size": 24, "num_hidden_layers": 2}})
        found.append(models.logits(plan.output, models.rows()))
    assert (found[0] == found[1]).all()


def cost(shape: Mapping[str, int]) -> float:
    return shape["a"] * shape["b"] + shape["c"]


def test_the_axes_shrink_together_and_the_rest_of_the_budget_goes_to_the_one_that_lost_most() -> None:
    # at 3/4 of both it costs 1927
    assert search(CHOICES, cost, 1927) == {"a": 64, "b": 30, "c": 7}
    # half of both costs 647, and 2/3 of both 1287, with 64 and 20; what is left of 1000 is enough for 32 and 30, at 967
    assert search(CHOICES, cost, 1000, grow=False) == {"a": 32, "b": 20, "c": 7}
    assert search(CHOICES, cost, 1000) == {"a": 32, "b": 30, "c": 7}


def test_coarse_sizes_do_not_leave_a_target_unused() -> None:
    """18 of both, at 325, can grow no further within 405; 10 and 40 are nearer."""
    coarse = Choices({"a": 40, "b": 40, "c": 1}, {"a": [10, 18, 40], "b": [10, 18, 40]})
    assert search(coarse, cost, 405, grow=False) == {"a": 18, "b": 18, "c": 1}
    assert search(coarse, cost, 405) in ({"a": 10, "b": 40, "c": 1}, {"a": 40, "b": 10, "c": 1})
    assert search(coarse, cost, 340) == {"a": 18, "b": 18, "c": 1}  # used to 96 %


def test_nothing_is_found_below_the_smallest_sizes() -> None:
    assert search(CHOICES, cost, 32 * 10 + 6) is None
    assert search(CHOICES, cost, 32 * 10 + 7) == {"a": 32, "b": 10, "c": 7}


@given(st.integers(min_value=327, max_value=96 * 40 + 7))
def test_what_is_found_fits_and_no_axis_could_be_larger(limit: int) -> None:
    shape = search(CHOICES, cost, limit)
    assert cost(shape) <= limit
    for axis, sizes in CHOICES.allowed.items():
        assert all(cost({**shape, axis: size}) > limit for size in sizes if size > shape[axis])
