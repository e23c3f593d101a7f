"""Layouts proven on a tiny model: stages (also derived ones) and tensor-parallel ranks have its loss and gradients."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from foundation.errors import ConfigError
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel import collectives, stages, tensor
from pipeline.engines.parallel.architecture_trial import random_model
from pipeline.engines.parallel.decoder import Decoder, DecoderLayout, local_owners, parameter_owners
from pipeline.engines.parallel.own_head import OwnHead
from pipeline.engines.parallel.sharded_trial import LossGradients, whole_gradients
from pipeline.engines.parallel.simulated_ranks import run_ranks
from pipeline.engines.parallel.stage_plan import StagePlan, stage_plan
from pipeline.engines.parallel.tensor_plan import derived_blocks
from pipeline.engines.parallel.tensor_styles import BlockPlan, scale_attributes
from pipeline.models.construction.buffers import fill_buffers
from pipeline.models.construction.meta import build_meta
from pipeline.models.resize.shrink import shrink
from tests.engines.parallel.layouts import check_family
from tests.models.architectures import batch_of, family_config, family_meta
from tests.sweeps.families import tiny_fields

EAGER = ("bloom", "llama4_text", "openai-gpt", "opt", "deepseek_v4", "qwen4_exp_text")
STAGED = [
    *("gpt2", "lfm2", "mamba2", "nemotron_h", *EAGER[:4], "qwen3", "mistral", "gemma", "gemma3_text", "mixtral"),
    # streams, an input for every layer, keys of earlier layers; integers; a router's state, the base model's parameters
    *("gemma3n_text", "glm_moe_dsa", "zaya"),
]
SHARDED = [
    *("gpt2", "olmoe", "deepseek_v32", "phi3", "lfm2", "nemotron_h", "gpt_bigcode", "longcat_flash", "opt"),
    *("gpt_oss", "qwen2_moe", "llama4", "dbrx", "bloom", "falcon", "llama", "cohere", "nanochat", "gemma4_text"),
]
SWEPT = [*EAGER[4:], "gemma4_text", "hy_v4", "xlnet", "xlstm", "zamba", "zamba2"]
HEADS = {
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 8.0},
}


@pytest.mark.parametrize(
    ("kind", "axis"),
    [
        *((kind, "pp") for kind in STAGED),
        *(pytest.param(kind, "pp", marks=pytest.mark.sweep) for kind in SWEPT),
        *((kind, "tp") for kind in SHARDED),
    ],
)
def test_a_family_is_proven_in_two_stages_or_tensor_parallel_ranks(kind: str, axis: str) -> None:
    began = time.process_time()
    check_family(kind, eager=axis == "pp" and kind in EAGER, parallel={axis: 2})
    assert time.process_time() - began < 15  # at most 3 s on an idle machine


def test_the_plan_lists_modules_in_the_order_of_a_forward_pass() -> None:
    gpt2, llama = (stage_plan(family_meta(kind, attention="eager")) for kind in ("gpt2", "llama"))
    assert gpt2 == StagePlan(
        "transformer.h", ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head"), derived=True
    )
    assert llama == StagePlan("model.layers", ("model.embed_tokens",), ("model.norm", "lm_head"))


@pytest.mark.parametrize(
    ("kind", "axis", "why"),
    [
        ("hrm_text", "pp", r".*none can be derived: .*layers model\.L_module\.layers do not run once each, in order.*"
         r"parallel\.pp 1"),
        ("recurrent_gemma", "tp", " = 2.*two tensor-parallel ranks fails on a tiny recurrent_gemma"),
    ],
)  # fmt: skip
def test_a_family_that_cannot_be_divided_is_refused_with_the_module(kind: str, axis: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)parallel\.{axis}{why}"):
        check_family(kind, parallel={axis: 2})


def without_inputs_of_layers(plan: StagePlan) -> StagePlan:
    return replace(plan, carried=tuple(each for each in plan.carried if each.origin or len(each.uses) > 1))


WRONG_SIDE = StagePlan("transformer.h", ("transformer.wte", "transformer.ln_f"), ("transformer.wpe", "lm_head"))


@pytest.mark.parametrize(
    ("kind", "wrong", "why"),
    [("gpt2", lambda _plan: WRONG_SIDE, "the loss is"), ("gemma3n_text", without_inputs_of_layers, "")],
)
def test_a_wrong_plan_of_stages_is_refused(kind: str, wrong: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "stage_plan", lambda model: wrong(stage_plan(model)))
    another = r"parallel.pp = 2.*pipeline stages of one layer each give another result"
    with pytest.raises(ConfigError, match=rf"(?s){another}.*{why}"):
        check_family(kind, parallel={"pp": 2})


def test_a_stage_has_no_parameter_of_the_base_model_that_another_stage_has() -> None:
    model = family_meta("zaya")
    owners = parameter_owners(model)
    layers = len(stages.layer_list(model)[1])
    stages.keep_stage(model, stages.StageLayers(1, 2, (layers // 2, layers), 1.0))
    assert "model.input_hidden_states_scale" in owners
    assert all(key in module._parameters for pairs in local_owners(owners, model).values() for module, key in pairs)
    assert "model.input_hidden_states_scale" not in local_owners(owners, model)


def test_a_stage_has_the_buffers_of_the_whole_model() -> None:
    whole, part = family_meta("falcon_h1"), family_meta("falcon_h1")  # its base model fills those of all layers
    layers = len(stages.layer_list(part)[1])
    stages.keep_stage(part, stages.StageLayers(1, 2, (layers // 2, layers), 1.0))
    for model in (whole, part):
        fill_buffers(model, torch.device("cpu"))
    expected = dict(whole.named_buffers())
    found = {name: buffer for name, buffer in part.named_buffers() if name in expected}
    assert f"model.layers.{layers - 1}.mamba.mup_vector" in found
    for name, buffer in found.items():
        torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0)


def test_a_tiny_model_has_layers_of_every_kind() -> None:
    for kind, kinds in (("recurrent_gemma", "block_types"), ("hy_v4", "indexer_types")):
        fields = {"vocab_size": 32, "pad_token_id": 0, "num_hidden_layers": 4}
        config = shrink(AutoConfig.for_model(kind, **fields), divide=2, layers=2, vocab_size=32)
        assert config.num_hidden_layers == len(getattr(config, kinds)) == 3


def test_a_head_whose_bias_another_module_has_is_not_sharded() -> None:
    config = AutoConfig.for_model(**tiny_fields("bert-generation"))
    with pytest.raises(ConfigError, match="bias of bert-generation's head belongs to two modules"):
        tensor.check_tp_plan(build_meta(config, dtype=torch.float32, attn_implementation="eager"), tp=2)


def test_a_gradient_that_differs_is_named() -> None:
    one = LossGradients(2.0, {"a": torch.ones(3), "b": torch.full((2,), 1e-9)})
    assert LossGradients(2.0, {"a": torch.ones(3), "b": torch.zeros(2)}).difference(one) is None
    assert LossGradients(2.0, {"a": torch.tensor([1, 1, 1.01])}).difference(one) == "the gradient of a differs"
    assert LossGradients(2.0, {}).difference(one) == "the gradient of a differs"
    assert LossGradients(2.1, one.gradients).difference(one) == "the loss is 2.1000 instead of 2.0000"
    assert "gradient of b" in str(LossGradients(2.0, {**one.gradients, "b": torch.ones(2)}).difference(one))


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("kind", HEADS)
def test_the_loss_of_a_head_with_its_own_function_is_the_models(kind: str, chunk: int | None) -> None:
    model, batch = random_model(family_config(kind, **HEADS[kind])), batch_of(length=24)
    expected = whole_gradients(model, batch.input_ids)
    results = {}
    for own in (True, False):
        model.zero_grad()
        layout = DecoderLayout(own_attention=False, chunk=chunk or 24, own_head=own)
        targets = replace(batch, labels=batch.input_ids)
        total = Decoder(model, layout, parameter_owners(model))(batch.input_ids, targets, CrossEntropy())[0]
        total.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results[own] = LossGradients(float(total.detach()), gradients).difference(expected)
    assert results[True] is None
    assert results[False] is not None  # the plain product is another model


def test_what_runs_before_the_head_is_the_models() -> None:
    model = random_model(family_config("minicpm3", dim_model_base=16))
    hidden = torch.ones(1, 2, 64)
    assert torch.allclose(OwnHead(model).head_input(hidden), hidden / 4)


def test_a_wrong_sum_of_simulated_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = r"(?s)parallel.tp = 2.*two tensor-parallel ranks give another result.*"
    with monkeypatch.context() as patched:
        patched.setattr(tensor.RowwiseLinear, "product", lambda self, x: 2 * nn.functional.linear(x, self.weight))
        with pytest.raises(ConfigError, match=wrong + "(the loss is|the gradient of)"):
            check_family("llama", parallel={"tp": 2})
    monkeypatch.setattr(  # the other rank's part of every gradient is lost
        collectives._AllGather, "backward", lambda ctx, grad: (grad.chunk(2, 1)[ctx.group.rank()], None, None)
    )
    with pytest.raises(ConfigError, match=wrong + r"the gradient of model\.\S+ differs"):
        check_family("llama", parallel={"tp": 2})


def blocks(kind: str, *, tp: int) -> dict[str, BlockPlan]:
    return derived_blocks(family_meta(kind, attention="eager"), tp=tp)


def test_linear_layers_are_sharded_by_shape_position_and_use() -> None:
    gpt2 = blocks("gpt2", tp=2)
    assert gpt2["transformer.h.3.attn"].styles == {"c_attn": "qkv", "c_proj": "rowwise"}
    assert ("", "split_size") in gpt2["transformer.h.3.attn"].scaled
    assert gpt2["transformer.h.3.mlp"] == BlockPlan({"c_fc": "colwise", "c_proj": "rowwise"})
    latent = blocks("deepseek_v3", tp=2)["model.layers.0.self_attn"].styles
    assert [name for name, style in latent.items() if style == "whole"] == ["q_a_proj", "kv_a_proj_with_mqa"]
    assert blocks("gpt_bigcode", tp=2)["transformer.h.0.attn"].styles["c_attn"] == "one key head"


def test_shared_experts_sinks_norms_over_all_heads_and_indexers_have_their_styles() -> None:
    mlp = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    assert blocks("qwen2_moe", tp=2)["model.layers.0.mlp.shared_expert"] == BlockPlan(mlp)
    assert blocks("llama4_text", tp=2)["model.layers.1.feed_forward.shared_expert"].styles == mlp
    assert blocks("gpt_oss", tp=2)["model.layers.0.self_attn"].having("heads") == ["sinks"]
    assert blocks("olmoe", tp=2)["model.layers.0.self_attn"].having("gathered") == ["q_norm", "k_norm"]
    sparse = blocks("deepseek_v32", tp=2)["model.layers.0.self_attn"]
    assert sparse.having("colwise") == ["q_b_proj", "kv_b_proj"]
    assert not any(module == "indexer" for module, _ in sparse.scaled)
    assert "transformer.blocks.0.norm_attn_norm.attn" in blocks("dbrx", tp=2)  # not the norms around it
    assert blocks("bloom", tp=2)["transformer.h.0.mlp"].own_residual
    assert blocks("falcon", tp=2)["transformer.h.0.self_attention"].having("one key head") == ["query_key_value"]


def test_a_block_runs_whole_if_it_cannot_be_sharded_or_tp_does_not_divide_its_heads() -> None:
    assert blocks("mamba2", tp=2) == {f"backbone.layers.{n}.mixer": BlockPlan({}) for n in range(4)}
    eight = blocks("gpt2", tp=8)  # of 4 heads
    assert {plan.styles == {} for plan in eight.values()} == {True}
    assert blocks("gpt2", tp=4)["transformer.h.0.attn"].styles


def with_style(style: str) -> Any:
    """Derives blocks whose fused projection has another style."""

    def changed(model: nn.Module, *, tp: int, **_: Any) -> dict[str, BlockPlan]:
        found = derived_blocks(model, tp=tp)
        own = {"c_attn": style}
        return {n: replace(p, styles={**p.styles, **own}) if "c_attn" in p.styles else p for n, p in found.items()}

    return changed


def with_other_slopes(*args: Any, rank: int, ranks: int) -> None:
    scale_attributes(*args, rank=1 - rank, ranks=ranks)


RESULT = "two tensor-parallel ranks (fails|give another)"
TENSOR = r"(the loss is|the gradient of (model|transformer)\.\S+)"


@pytest.mark.parametrize(
    ("kind", "function", "wrong", "why"),
    [
        *(("gpt2", "derived_blocks", with_style(style), RESULT) for style in ("colwise", "halves", "one key head")),
        # a norm over a rank's own heads; no sum of a shared expert's outputs; the other rank's slopes of ALiBi
        ("olmoe", "whole_features", lambda _group, _norm, args: (args[0].repeat(1, 1, 2),), TENSOR),
        ("qwen2_moe", "reduce_scatter", lambda full, group, dim: full.chunk(2, dim)[group.rank()], TENSOR),
        ("bloom", "scale_attributes", with_other_slopes, TENSOR),
    ],
)
def test_a_wrong_style_or_exchange_of_a_derived_plan_is_refused(
    kind: str, function: str, wrong: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor, function, wrong)
    with pytest.raises(ConfigError, match=rf"(?s)parallel.tp = 2.*{why}"):
        check_family(kind, parallel={"tp": 2})


def test_simulated_ranks_exchange_tensors_and_hand_on_the_first_error() -> None:
    def sums(group: Any) -> tuple[list[float], list[float]]:
        own = torch.tensor([group.rank() + 1.0])
        whole = collectives.all_gather(own, group, dim=0)
        part = collectives.reduce_scatter(whole, group, dim=0)
        torch.distributed.all_reduce(own, group=group)
        return whole.tolist(), [*part.tolist(), *own.tolist()]

    assert run_ranks(2, sums) == [([1.0, 2.0], [2.0, 3.0]), ([1.0, 2.0], [4.0, 3.0])]

    def fails(group: Any) -> None:
        if group.rank() == 1:
            raise ValueError("of rank 1")
        torch.distributed.all_reduce(torch.ones(1), group=group)

    with pytest.raises(ValueError, match="of rank 1"):
        run_ranks(2, fails)
