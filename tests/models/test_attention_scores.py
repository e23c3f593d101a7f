"""Soft caps and sinks: outputs and gradients are those of transformers' eager attention, by every implementation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.granite_swa import modeling_granite_swa

from pipeline.engines.objective import CrossEntropy
from pipeline.models import attention
from pipeline.models.attention import attend
from pipeline.models.attention_logits import LARGEST, REFERENCE_NAME
from pipeline.models.attention_scores import ScoreRule, plain_attention, score_function, score_rule
from pipeline.models.masks import CAUSAL, FULL, AttentionMask, make_mask, with_blocks
from tests.models.architectures import T, batch_of, plain_decoder
from tests.models.test_masks import documents_of

B, H, K, D = 2, 4, 2, 8
FP64: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
FP32: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
CPU = torch.device("cpu")


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def leaves(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    heads = {"query": H, "key": K, "value": K}
    return {name: drawn(B, each, T, D, seed=each + len(name), dtype=dtype) for name, each in heads.items()}


@pytest.mark.parametrize("documents", [None, documents_of([[5, 9], [20]], T)], ids=["one-document", "documents"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "granite_swa"])
def test_outputs_and_gradients_are_those_of_eager_attention_in_fp64(
    kind: str, window: int | None, documents: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = {"gemma2": modeling_gemma2, "gpt_oss": modeling_gpt_oss, "granite_swa": modeling_granite_swa}[kind]
    # in place of the fp32 that they force
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim, **_: torch.softmax(scores, dim))
    monkeypatch.setattr(Tensor, "to", lambda self, *_args, **_options: self)
    inputs, sinks = leaves(), None if kind == "gemma2" else drawn(H, seed=9)
    rule = score_rule(softcap=1.5 if kind == "gemma2" else None, sinks=sinks)
    assert rule is not None
    mask = make_mask(documents, window, length=T, dtype=torch.float64, device=CPU)
    additive = torch.full((T, T), -torch.inf).triu(1) if mask.additive is None else mask.additive
    module = SimpleNamespace(num_key_value_groups=H // K, training=False, sinks=sinks)
    expected, _ = eager.eager_attention_forward(
        module, *inputs.values(), additive, scaling=0.4, dropout=0.0, softcap=rule.softcap
    )
    found = attend(**inputs, scale=0.4, mask=mask, rule=rule).transpose(1, 2)
    torch.testing.assert_close(found, expected, **FP64)
    grad, wanted = drawn(*found.shape, seed=3).detach(), [*inputs.values()] + ([] if sinks is None else [sinks])
    for own, theirs in zip(
        torch.autograd.grad(found, wanted, grad), torch.autograd.grad(expected, wanted, grad), strict=True
    ):
        torch.testing.assert_close(own, theirs, **FP64)


@pytest.mark.parametrize("documents", [None, documents_of([[5, 9], [20]], T)], ids=["one-document", "documents"])
@pytest.mark.parametrize(
    "rule",
    [
        ScoreRule(softcap=1.5),
        ScoreRule(sinks=torch.randn(H)),
        ScoreRule(softcap=2.0, bias=torch.randn(1, H, T)),
        ScoreRule(bias=torch.randn(B, H, T)),
    ],
)
def test_flex_attention_has_outputs_and_sums_of_plain_products(
    rule: ScoreRule, documents: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda *_: flex_attention)  # a CPU compiles no log-sums
    inputs = {name: each.detach() for name, each in leaves(torch.float32).items()}
    options: dict[str, Any] = {"length": T, "dtype": torch.float32, "device": CPU}
    dense, blocks = (make_mask(documents, 7, **options, blocks=blocks) for blocks in (False, True))
    whole: tuple[tuple[AttentionMask, AttentionMask], ...] = ((dense, blocks), (CAUSAL, CAUSAL), (FULL, FULL))
    for plain, of_flex in whole:
        expected = plain_attention(**inputs, scale=0.4, mask=plain, rule=rule)
        found = attention.attend_by_rule(**inputs, scale=0.4, mask=of_flex, rule=rule, flex=True)
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, **FP32)


def test_masks_without_a_tensor_become_blocks_once() -> None:
    sizes: dict[str, Any] = {"queries": 300, "keys": 300, "device": CPU}
    causal, full = (with_blocks(each, **sizes).blocks for each in (CAUSAL, FULL))
    assert causal is not None
    assert full is not None
    assert causal is with_blocks(CAUSAL, **sizes).blocks
    assert causal.to_dense().sum() == 6
    assert full.to_dense().sum() == 9
    assert score_function(ScoreRule(softcap=1.5)) is score_function(ScoreRule(softcap=1.5))
    assert score_rule(softcap=None) is None


def test_the_reference_of_qk_clip_has_sinks_and_the_logits_of_our_attention() -> None:
    found = {}
    for name in (REFERENCE_NAME, "headrace"):
        decoder, batch = plain_decoder("gpt_oss", attention=name), batch_of()
        for layer in decoder.causal.model.layers:  # type: ignore[union-attr]
            setattr(layer.self_attn, LARGEST, torch.full((K,), -torch.inf))
        loss = decoder.train()(batch.input_ids, batch, CrossEntropy())[0]
        found[name] = [loss, *(layer.self_attn.largest_logits for layer in decoder.causal.model.layers)]  # type: ignore[union-attr]
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
