"""Megatron's arguments: what makes another model is refused, what decides the next losses is named, all else passes."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.errors import CheckpointError
from pipeline.checkpoint.importing.megatron_arguments import check_arguments, fields_of
from tests.checkpoint.importing.test_import import refusal
from tests.checkpoint.importing.test_megatron import words_of, work

__all__ = ["work"]

LLAMA = {"model_type": "llama", "hidden_act": "gelu", "rope_parameters": {"rope_type": "llama3", "factor": 32.0}}
MISTRAL = {"model_type": "mistral", "sliding_window": 128}
PLAIN: dict[str, Any] = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "window_size": None,
    "hidden_dropout": 0.0,
    "clip_grad": 1.0,
    # layout, speed, logs and paths
    "tensor_model_parallel_size": 8,
    "recompute_granularity": "full",
    "attention_backend": Namespace(name="auto"),
    "tensorboard_dir": "/logs",
    "exit_signal": Namespace(name="SIGTERM"),
    # of experts, where there are none; of Muon, where it is Adam
    "moe_router_score_function": "sigmoid",
    "moe_aux_loss_coeff": 0.01,
    "muon_momentum": 0.8,
    # of a fork, and off
    "our_new_loss": False,
}
OTHER_MODELS = {
    "rotary_percent": 0.5,
    "rotary_seq_len_interpolation_factor": 4,
    "no_rope_freq": 4,
    "rotary_interleaved": True,
    "window_size": (127, 0),
    "softmax_type": "learnable",
    "squared_relu": True,
    "quick_geglu": True,
    "swiglu": False,
    "normalization": "LayerNorm",
    "position_embedding_type": "none",
    "attention_output_gate": True,
    "apply_residual_connection_post_layernorm": True,
    "apply_layernorm_1p": True,
    "layernorm_zero_centered_gamma": True,
    "qk_l2_norm": True,
    "spec": ["a.module", "layers"],
}
OTHER_ROUTERS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_group_topk": 2,
    "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"],
}
OTHER_TRAINING: dict[str, tuple[Any, str]] = {
    "hidden_dropout": (0.1, "no dropout"),
    "decoupled_lr": (1e-4, "rate of all others"),
    "decoupled_weight_decay": (False, "decoupled"),
    "clip_grad": (0.5, "gradient_clipping"),
    "reset_attention_mask": (True, "data.mask_documents"),
    "moe_aux_loss_coeff": (0.01, "moe.aux_loss_coef"),
    "moe_z_loss_coeff": (1e-3, "no z-loss"),
    "moe_expert_capacity_factor": (1.0, "all their tokens"),
    "our_new_loss": (0.3, "not known here"),
}


def named(given: dict[str, Any], config: dict[str, Any] = LLAMA) -> list[str]:
    return check_arguments(Path("iter_0000003"), Namespace(**{**PLAIN, **given}), config)


def test_arguments_of_layout_speed_and_logs_pass_and_those_that_older_versions_lack() -> None:
    assert named({}) == []
    assert check_arguments(Path(), Namespace(), {"model_type": "gpt2"}) == []


@pytest.mark.parametrize("name", [*OTHER_MODELS, *OTHER_ROUTERS])
def test_an_argument_that_makes_another_model_is_refused_by_name(name: str) -> None:
    routers = {"num_experts": 8, "moe_router_score_function": "softmax"}
    given = {name: OTHER_MODELS[name]} if name in OTHER_MODELS else {**routers, name: OTHER_ROUTERS[name]}
    with pytest.raises(CheckpointError, match=rf"(?s)another model of the same weights:\n    {name} = .*Bridge"):
        named(given)


@pytest.mark.parametrize("name", OTHER_TRAINING)
def test_an_argument_that_decides_the_next_losses_is_named_with_what_a_run_does(name: str) -> None:
    value, ours = OTHER_TRAINING[name]
    [line] = [
        text for text in named({name: value, "num_experts": 8, "moe_router_score_function": "softmax"}) if name in text
    ]
    assert f"{name} = {value}" in line
    assert ours in line


def test_an_argument_that_becomes_a_field_is_compared() -> None:
    scaled = {"use_rope_scaling": True, "rope_scaling_factor": 8.0, "norm_epsilon": None}
    found = fields_of(Namespace(**PLAIN, **scaled), LLAMA)
    assert found["hidden_act"] == "silu"
    assert (found["rope_parameters"]["factor"], found["rope_parameters"]["low_freq_factor"]) == (8.0, 1.0)
    assert fields_of(Namespace(layernorm_epsilon=1e-6), {"rms_norm_eps": 1e-5}) == {"rms_norm_eps": 1e-6}
    for window, ours in (((127, 0), 128), ((63, 0), 64), (None, None), ((-1, -1), None)):
        assert named({"window_size": window}, MISTRAL) == []
        assert fields_of(Namespace(window_size=window), MISTRAL) == {"sliding_window": ours}


def test_an_import_refuses_another_model_and_names_the_rest(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(work / "llama", tmp_path / "llama"))
    saved = {"iteration": 3, "args": Namespace(rotary_percent=0.5), "optimizer": {"param_groups": [{"step": 3.0}]}}
    torch.save(saved, folder / "iter_0000003/common.pt")
    said = refusal([str(folder), *words_of("llama", work, tmp_path / "run")[1:]], capsys)
    assert "rotary_percent = 0.5; the config's model has 1.0" in said
