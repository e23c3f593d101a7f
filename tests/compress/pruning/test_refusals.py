"""Refusals of prune: before torch is imported, with nothing written, and with a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError, HeadraceError
from foundation.section import parse
from pipeline.compress.pruning.config import PruneConfig
from pipeline.compress.pruning.rules import prepare
from pipeline.compress.pruning.sharded import open_model
from tests.compress.pruning import models
from tests.compress.pruning.conftest import plan_of, raw_config, write_config
from tests.evaluation.heldout.small import make_tokens, run_python
from tests.support import refusal_of
from tests.warm import ROOT

ENTRY = ROOT / "pipeline/prune.py"


@pytest.fixture(scope="module")
def model(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make(tmp_path_factory.mktemp("model") / "llama", "llama", tokens)


def test_a_refusal_imports_no_torch_and_writes_nothing(model: Path, tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model, tokens, target={"parameters": 10})
    said = refusal_of(run_python("-X", "importtime", ENTRY, "--config", config))
    assert "error: target.parameters = 10" in said
    least = plan_of(
        tmp_path, model, tokens, target={"shape": {"hidden_size": 8, "intermediate_size": 8, "num_key_value_heads": 1}}
    )
    assert f"use {least.anatomy.parameters(least.shape)} or more" in said
    assert "or add num_hidden_layers to axes" in said
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in said.splitlines()}
    assert "pydantic" in imported
    assert not imported & {"torch", "transformers"}
    assert [p.name for p in tmp_path.iterdir()] == ["prune.json"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "it does not say how small"),
        ({"target": {"parameters": 100, "bytes": 100}}, "these are several targets"),
        ({"target": {"parameters": 10_000_000}}, "the model has"),
        ({"target": {"bytes": 100}}, "the model still has"),
        ({"target": {"shape": {"hidden_size": 20}}}, "use 16 or 24"),
        ({"target": {"shape": {"hidden_size": 32}}}, "the model's own sizes"),
        ({"target": {"shape": {"hidden_size": 40}}}, "the model has 32"),
        ({"target": {"shape": {"num_key_value_heads": 3}}}, "use 2"),
        ({"target": {"shape": {"num_experts": 2}}}, "no such size that can be cut"),
        ({"target": {"parameters": 9_000}, "axes": ["num_experts"]}, "no such size that can be cut"),
        ({"target": {"parameters": 9_000}, "axes": []}, "no size may be cut"),
        ({"target": {"shape": {"hidden_size": 16}}, "axes": ["intermediate_size"]}, "nothing is searched for target"),
        ({"target": {"shape": {"hidden_size": 16}}, "calibration": {"iterations": 5}}, "calibration.iterations"),
        ({"target": {"shape": {"hidden_size": 16}}, "calibration": {"samples": 100_000}}, "calibration.samples"),
        ({"target": {"latency": 1.5}}, "target.latency"),
        ({"target": {"shape": {"hidden_size": 16}}, "importance": {"tp": 2}}, "start a multiple of 2"),
        ({"target": {"shape": {"hidden_size": 16}}, "consumers": ["llama.cpp"]}, "llama.cpp reads GGUF files"),
        (
            {"target": {"shape": {"hidden_size": 16}}, "calibration": {"samples": 1}},
            "32 tokens, and intermediate_size has 48 channels to rank\n  try: use 2 or",
        ),
    ],
)
def test_an_invalid_config_is_refused(
    model: Path, tokens: Path, tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    with pytest.raises(HeadraceError) as caught:
        prepare(parse(PruneConfig, raw_config(tmp_path, model, tokens, **fields)))
    assert expected in str(caught.value)


LAYOUTS_REFUSED = [
    (4, {"tp": 4}, "importance.tp = 4", "it does not divide model.config.num_key_value_heads (2)"),
    (3, {"cp": 3}, "data.sequence_length = 32", "cp 3 x tp 1"),
    (4, {"tp": 2, "pp": 3}, "importance.pp = 3", "start a multiple of 6"),
    (2, {"pp": 2, "zero_stage": 3, "engine": "deepspeed"}, "importance.pp = 2", "importance.engine torch"),
]


@pytest.mark.parametrize(("processes", "section", "field", "expected"), LAYOUTS_REFUSED)
def test_a_layout_that_cannot_be_is_refused_by_the_name_of_its_field_before_torch_is_imported(
    model: Path, tokens: Path, tmp_path: Path, processes: int, section: dict[str, Any], field: str, expected: str
) -> None:
    raw = raw_config(tmp_path, model, tokens, target={"shape": {"hidden_size": 16}}, importance=section)
    with pytest.raises(ConfigError) as caught:  # `prepare` imports no torch, see above
        prepare(parse(PruneConfig, raw), world_size=processes)
    assert str(caught.value).startswith(field)
    assert expected in str(caught.value)
    assert " parallel." not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "section", "expected"),
    [
        ("gpt2", {"cp": 8}, "ulysses splits 4 heads"),
        ("gpt2", {"tp": 2}, "this architecture cannot be pruned with tensor parallelism"),
    ],
)
def test_a_layout_that_an_architecture_has_no_plan_for_is_refused_before_processes_meet(
    tokens: Path, tmp_path: Path, name: str, section: dict[str, int], expected: str
) -> None:
    source = models.make(tmp_path / name, name, tokens)
    raw = raw_config(tmp_path, source, tokens, target={"shape": {"num_hidden_layers": 2}}, importance=section)

    def open_it() -> None:
        layout = prepare(parse(PruneConfig, raw), world_size=next(iter(section.values()))).layout
        open_model(layout)

    with pytest.raises(ConfigError, match=expected) as caught:
        open_it()
    assert caught.value.field == f"importance.{next(iter(section))}"


def test_calibration_with_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    other = make_tokens(tmp_path / "other", [f"Quite another text, {n} times over." for n in range(160)])
    with pytest.raises(ConfigError, match=r"data\.path = .*\n  why: it was made with tokenizer"):
        plan_of(tmp_path, model, other, target={"shape": {"hidden_size": 16}})


def test_an_existing_output_is_not_changed(model: Path, tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "pruned").mkdir()
    with pytest.raises(HeadraceError, match="it already exists"):
        plan_of(tmp_path, model, tokens, target={"shape": {"hidden_size": 16}})


def test_fewer_experts_than_a_token_goes_to_are_refused(tokens: Path, tmp_path: Path) -> None:
    source = models.make(tmp_path / "mixtral", "mixtral", tokens)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 2}))
    with pytest.raises(HeadraceError, match="each token goes to 2\n  try: use 2"):
        plan_of(tmp_path, source, tokens, target={"shape": {"num_experts": 1}})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"target": {"shape": {"num_key_value_heads": 3, "hidden_size": 16}}}, "use hidden_size 24"),
        ({"target": {"shape": {"hidden_size": 20}}}, "in heads of 8, .*\n  try: use 16 or 24"),
        ({"target": {"parameters": 30_000}, "axes": ["num_key_value_heads"]}, "try: use hidden_size"),
    ],
)
def test_gpt2_whose_heads_follow_from_its_hidden_size_is_refused_what_contradicts_it(
    tokens: Path, tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    source = models.make(tmp_path / "gpt2", "gpt2", tokens)
    with pytest.raises(ConfigError, match=expected):
        plan_of(tmp_path, source, tokens, **fields)


def test_layers_that_compute_with_their_number_are_not_cut(tokens: Path, tmp_path: Path) -> None:
    source = models.make(tmp_path / "gpt2", "gpt2", tokens, scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(ConfigError, match="divided by the number of its layer"):
        plan_of(tmp_path, source, tokens, target={"shape": {"num_hidden_layers": 2}})


def test_a_search_does_not_cut_layers_that_are_not_alike(tokens: Path, tmp_path: Path) -> None:
    source = models.make(tmp_path / "mixed", "qwen3_moe", tokens, mlp_only_layers=[0])
    with pytest.raises(ConfigError, match=r"target\.shape\.num_hidden_layers"):
        plan_of(tmp_path, source, tokens, target={"parameters": 30_000}, axes=["num_hidden_layers"])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "phi"}, "it is a phi: .*\n  try: use one of llama"),
        ({"quantization_config": {"quant_method": "gptq"}}, "it is quantized, by gptq"),
        ({"intermediate_size": 47}, "does not fit its config.json"),
        (
            {"model_type": "mixtral", "num_local_experts": 4},
            r"a mixtral has no known tensor model\.layers\.0\.mlp\.down_proj\.bias",
        ),
    ],
)
def test_a_model_that_is_not_known_is_refused_by_name(
    model: Path, tokens: Path, tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    source = shutil.copytree(model, tmp_path / "other")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(HeadraceError, match=expected):
        plan_of(tmp_path, source, tokens, target={"shape": {"num_hidden_layers": 2}})
