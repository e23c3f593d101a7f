"""Recurrent blocks with document masks and with sequences and heads divided among ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from foundation.errors import ConfigError
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.engines.parallel.architecture_trial import random_model
from pipeline.engines.parallel.recurrent import DocumentRows, Recurrent, SequenceRanks, recurrent_blocks
from pipeline.engines.parallel.recurrent_heads import DividedRows, divided_rows, own_heads
from pipeline.engines.parallel.simulated_ranks import run_ranks
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction.meta import build_meta
from pipeline.models.count import measure
from tests.engines.parallel.layouts import T, resolved
from tests.sweeps.families import tiny_fields

MASKED: dict[str, Any] = {"data": {"sources": [{"path": "n"}], "sequence_length": T, "mask_documents": True}}
RING: dict[str, Any] = {"parallel": {"cp": 2, "cp_method": "ring"}}
TP: dict[str, Any] = {"parallel": {"tp": 2}}
WHOLE = ("falcon_mamba", "jamba", "mamba", "minimax", "zamba", "zaya")
DIVIDED_HEADS = (
    *("bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba2"),
    *("nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_next", "recurrent_gemma"),
)
IN_CI = ("bamba", "kimi_linear", "zaya")
SWEEP = pytest.mark.sweep


def built(kind: str, **fields: Any) -> torch.nn.Module:
    config = AutoConfig.for_model(**{**tiny_fields(kind), "pad_token_id": 1, **fields})
    return build_meta(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)


def check(kind: str, sections: dict[str, Any]) -> None:
    check_layout(resolved(world_size=2, model={"config": tiny_fields(kind)}, **sections), built(kind))


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in IN_CI else SWEEP) for k in (*WHOLE, "zamba2", *DIVIDED_HEADS)]
)
def test_a_family_takes_document_masks_and_divided_sequences_and_heads(kind: str) -> None:
    for sections in (MASKED, {**RING, **MASKED}, TP):
        began = time.process_time()
        check(kind, sections)
        assert time.process_time() - began < 15  # at most 3 s on an idle machine
    divided = recurrent_blocks(built(kind)).values()
    assert all(divided) if kind in DIVIDED_HEADS else not all(divided)


def test_a_state_that_crosses_documents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recurrent, "begin_micro_batch", lambda *_args, **_kwargs: None)
    for sections, field in ((MASKED, "data.mask_documents"), (RING, "parallel.cp")):
        with pytest.raises(ConfigError, match=f"(?s){field}.*bamba mix positions by other means than attention"):
            check("bamba", sections)


@pytest.mark.parametrize("wrong", ["position", "order"])
def test_a_wrong_part_of_a_sequence_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    if wrong == "order":  # as if the ranks had contiguous parts
        monkeypatch.setattr(SequenceRanks, "_order", lambda _self, full: torch.arange(full.shape[1]))
    else:
        monkeypatch.setattr(SequenceRanks, "scattered", SequenceRanks.own)  # one rank's summand
    with pytest.raises(ConfigError, match=r"(?s)parallel.cp = 2.*two context-parallel ranks give another result"):
        check("lfm2", {**RING, "parallel": {"cp": 2, "cp_method": "ring" if wrong == "order" else "ulysses"}})


def test_heads_whose_rows_are_wrong_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("lfm2", hidden_size=32, conv_L_cache=5)  # no other test's: results are cached
    monkeypatch.setattr(DividedRows, "of", lambda self, tensor, **_: tensor.narrow(self.dim, 0, self.size(2)))
    assert set(recurrent_blocks(model).values()) == {False}


def test_the_rows_of_a_fused_projection_are_those_of_a_ranks_heads() -> None:
    block = built("bamba", mamba_n_groups=2).get_submodule("model.layers.0.mamba")
    rows = divided_rows(block, 2)
    assert rows is not None
    inner, states, heads = 128, 2 * 16, 8
    whole = torch.arange(2 * inner + 2 * states + heads)
    own = rows["in_proj.weight"].of(whole, rank=1, ranks=2)
    starts = (0, inner, 2 * inner, 2 * inner + states, 2 * inner + 2 * states)
    sizes = (inner, inner, states, states, heads)
    assert own.tolist() == [i for at, n in zip(starts, sizes, strict=True) for i in range(at + n // 2, at + n)]
    assert divided_rows(block, 3) is None
    one_group = divided_rows(built("bamba").get_submodule("model.layers.0.mamba"), 2)
    assert one_group["conv1d.weight"].segments == ((inner, True), (16, False), (16, False))  # type: ignore[index]


def test_every_gradient_of_divided_heads_is_a_summand_of_the_whole_one() -> None:
    block: Any = random_model(AutoConfig.for_model(**tiny_fields("bamba")), attention="eager").model.layers[0].mamba
    states = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    block.out_proj.bias = torch.nn.Parameter(torch.ones(64))  # only one rank adds it
    expected = block(states)
    wanted = torch.autograd.grad(expected.square().sum(), [*block.parameters()])

    def run(group: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        forward = own_heads(block, rank=group.rank(), ranks=2, groups=(group,))
        assert forward is not None
        out = forward(states)
        return out.detach(), torch.autograd.grad((out * 2 * expected.detach()).sum(), [*block.parameters()])

    (one, grads), (other, further) = run_ranks(2, run)
    torch.testing.assert_close(one + other, expected.detach(), rtol=1e-4, atol=1e-4)
    for name, first, second, whole in zip(dict(block.named_parameters()), grads, further, wanted, strict=True):
        assert float((first + second - whole).norm() / whole.norm()) < 1e-4, name


def test_documents_run_apart_with_less_padding_than_tokens() -> None:
    begins = torch.rand(3, 64, generator=torch.Generator().manual_seed(1)) < 0.2
    documents = begins.cumsum(1)
    rows = DocumentRows.of(documents)
    assert rows is not None
    assert sum(index.numel() for index, _ in rows.calls) < 2 * documents.numel()
    values = torch.rand(3, 64, 2, dtype=torch.float64)
    found = rows.run(lambda values, _one: values.cumsum(1), (values, torch.zeros(1, 64)), {}, (3, 64))
    for sample, whole, part in zip(documents, values, found, strict=True):
        for number in sample.unique():
            torch.testing.assert_close(part[sample == number], whole[sample == number].cumsum(0))
    assert DocumentRows.of(torch.zeros(3, 64)) is None  # each sample is one document


def test_layers_without_attention_have_no_attention_flops() -> None:
    model = built("nemotron_h")  # Mamba-2, experts, attention, MLP
    long, short = (measure(model, model.config, sequence_length=n).flops_per_token for n in (4096, 2048))  # type: ignore[arg-type]
    assert long - short == 12 * 64 * 2048  # type: ignore[operator]  # one layer with 4 heads of size 16
