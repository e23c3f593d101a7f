"""Quantization-aware training computes with the weights that a quantization stores, in every layout that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.compress.quantization.weights import scale_of
from pipeline.config.rules.curve import curve_fields
from pipeline.config.sections.compression import QuantizationAwareSection
from pipeline.engines.parallel.quantization_aware import (
    QuantizationAwareLinear,
    apply_quantization_aware,
    check_quantization_aware,
    rounding_of,
)
from pipeline.models.construction.meta import build_meta
from pipeline.models.folder.loading import load_model
from pipeline.models.hf_config import resolve_hf_config
from pipeline.models.rounding import e4m3, integers
from pipeline.run.distillation.teacher import teacher_run
from tests import warm
from tests.compress.quantization.test_quantize import packed_here
from tests.compress.quantization.test_smoothing import heldout_loss, make_outliers
from tests.conftest import launch, losses, tiny_config, write_config
from tests.engines.layout_worker import LENGTH, VOCABULARY, resolved
from tests.evaluation.heldout.small import SEQUENCE

FIELD = "quantization_aware"


def meta_model(run: Any) -> nn.Module:
    hf = resolve_hf_config(run.config.model, tokenizer={"vocab_size": VOCABULARY}, sequence_length=LENGTH)
    return build_meta(hf, dtype=torch.float32, attn_implementation="sdpa")


def aware(inputs: int, outputs: int, **section: Any) -> QuantizationAwareLinear:
    torch.manual_seed(0)
    linear = QuantizationAwareLinear(inputs, outputs)
    linear.rounding = rounding_of(parse(QuantizationAwareSection, section))
    return linear


@pytest.mark.parametrize(
    ("section", "args"),
    [
        ({"scheme": "W4A16"}, {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ({"scheme": "W4A16", "group_size": 16}, {"num_bits": 4, "strategy": "group", "group_size": 16}),
        ({"scheme": "W8A16"}, {"num_bits": 8, "strategy": "channel"}),
        ({"scheme": "FP8"}, {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ],
)
def test_weights_are_those_of_the_quantization(section: dict[str, Any], args: dict[str, Any]) -> None:
    linear = aware(64, 48, **section)
    scale = scale_of(linear.weight, QuantizationArgs(symmetric=True, **args), torch.float32)
    rounding = e4m3 if args.get("type") == "float" else integers(args["num_bits"])
    expected = rounding(linear.weight, scale.repeat_interleave(64 // scale.shape[1], 1))
    assert torch.equal(linear.rounding.weights(linear.weight), expected)
    if not linear.rounding.activations:
        features = torch.randn(5, 64)
        assert torch.allclose(linear(features), nn.functional.linear(features, expected, linear.bias), atol=1e-5)


def test_the_gradient_passes_straight_through_the_rounding() -> None:
    linear = aware(64, 48, scheme="W8A8")
    features = torch.randn(5, 64, requires_grad=True)
    out = linear(features)
    given = torch.randn_like(out)
    out.backward(given)
    rounded, weight = linear.rounding.tokens(features.detach()), linear.rounding.weights(linear.weight.detach())
    assert torch.allclose(linear.weight.grad, given.T @ rounded, atol=1e-4)
    assert torch.allclose(features.grad, given @ weight, atol=1e-4)
    assert not torch.equal(rounded, features)


def test_zeros_stay_zeros() -> None:
    linear = aware(64, 48, scheme="W4A16")
    with torch.no_grad():
        linear.weight[:, :32] = 0
    assert torch.isfinite(linear(torch.randn(2, 64))).all()


def test_a_quantized_layer_keeps_its_name_and_routers_are_left_alone() -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    model = meta_model(resolved({"model": experts}, processes=1))
    names = list(model.state_dict())
    apply_quantization_aware(model, parse(QuantizationAwareSection, {"scheme": "W8A8"}))
    assert list(model.state_dict()) == names
    kinds = {name: type(module) is QuantizationAwareLinear for name, module in model.named_modules()}
    assert kinds["model.layers.0.self_attn.q_proj"]
    assert not kinds["model.layers.0.mlp.gate"]
    assert not kinds["lm_head"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"parallel": {"tp": 2}}, "tp 2 shards these"),
        ({FIELD: {"scheme": "W8A8", "group_size": 16}}, "one scale for each row"),
        ({"bf16": {"enabled": True}, "fp8": {"enabled": True}}, "set fp8.enabled to false"),
    ],
)
def test_what_it_does_not_combine_with_is_refused(case: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved({FIELD: {"scheme": "W4A16"}, **case}, processes=2)


def test_a_model_that_cannot_be_rounded_so_is_refused() -> None:
    run = resolved({FIELD: {"scheme": "W4A16", "group_size": 7}}, processes=1)
    with pytest.raises(ConfigError, match=r"group_size = 7\n.*inputs, which 7 does not divide"):
        check_quantization_aware(run.config.quantization_aware, meta_model(run))


def test_a_resume_with_another_scheme_is_another_curve() -> None:
    fields = [
        curve_fields(resolved({FIELD: section} if section else {}, processes=1))[FIELD]
        for section in (None, {"scheme": "W4A16"}, {"scheme": "FP8"})
    ]
    assert fields[0] is None
    assert fields[1] != fields[2]


def run_config(tokens: Path, work: Path, name: str, **fields: Any) -> Path:
    config = tiny_config(tokens, work / name) | {"engine": "torch", **fields}
    config["data"]["sequence_length"] = SEQUENCE
    config["run"] |= {"steps": 30, "checkpoint_every": 30}
    return write_config(work / f"{name}.json", config)


@pytest.mark.integration
def test_the_curve_is_that_of_one_process_on_both_engines(tokens: Path, tmp_path: Path) -> None:
    section = {FIELD: {"scheme": "W4A16", "group_size": 16}}
    curves = {}
    for name, processes, fields in (
        ("one", 1, {"zero_optimization": {"stage": 0}}),
        ("fsdp", 2, {"zero_optimization": {"stage": 3}}),
        ("zero3", 2, {"engine": "deepspeed", "zero_optimization": {"stage": 3}}),
    ):
        config = run_config(tokens, tmp_path, name, **section, **fields)
        launch("train.py", config, "run.steps=8", "run.checkpoint_every=8", processes=processes)
        curves[name] = losses(tmp_path / name)
    # a weight near the middle of two stored values may be rounded to the other one where sums have another order
    assert curves["fsdp"] == pytest.approx(curves["one"], rel=2e-3)
    assert curves["zero3"] == pytest.approx(curves["one"], rel=2e-3)


@pytest.mark.integration
def test_an_outlier_model_is_trained_to_what_can_be_rounded(model: Path, tokens: Path, tmp_path: Path) -> None:
    """Thirty steps, and the same without the rounding as a control; both are rounded to the nearest afterwards."""
    source = make_outliers(model, tmp_path / "outliers", activations=False)
    lost = {}
    for name, section in (("plain", None), ("aware", {"scheme": "W4A16", "group_size": 32})):
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.0}}
        fields = {"model": {"path": str(source)}, "optimizer": optimizer, FIELD: section}
        config = run_config(tokens, tmp_path, name, **fields, zero_optimization={"stage": 0})
        launch("train.py", config)
        warm.run("-m", "pipeline", "export", tmp_path / name, tmp_path / f"{name}-model").check_returncode()
        (tmp_path / f"{name}-small").mkdir()
        packed_here(tmp_path / f"{name}-small", tmp_path / f"{name}-model", tokens, scheme="W4A16", group_size=32)
        lost[name] = heldout_loss(tmp_path / f"{name}-small/small", tokens) - heldout_loss(model, tokens)
    assert load_model(tmp_path / "aware-model").config.model_type == "llama"
    assert lost["aware"] < 0.4 * lost["plain"]


def test_a_mixture_whose_experts_would_stay_unrounded_is_refused() -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    run = resolved({"model": experts, FIELD: {"scheme": "W8A8"}}, processes=1)
    with pytest.raises(ConfigError, match="has its experts in one tensor"):
        check_quantization_aware(run.config.quantization_aware, meta_model(run))


def test_a_teacher_is_not_rounded() -> None:
    run = resolved({FIELD: {"scheme": "W8A8"}}, processes=1)
    assert run.config.quantization_aware is not None
    assert teacher_run(run).config.quantization_aware is None
