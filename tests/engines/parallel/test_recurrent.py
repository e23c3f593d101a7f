"""Recurrent blocks with document masks and with sequences and heads divided among ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from foundation.errors import ConfigError
from pipeline.engines.parallel.recurrent import DocumentRows, Recurrent, SequenceRanks, recurrent_blocks
from pipeline.engines.parallel.recurrent_heads import DividedRows, divided_rows
from pipeline.models.count import measure
from tests.engines.parallel.layouts import T, check_family
from tests.models.architectures import family_meta

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


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in IN_CI else SWEEP) for k in (*WHOLE, "zamba2", *DIVIDED_HEADS)]
)
def test_a_family_takes_document_masks_and_divided_sequences_and_heads(kind: str) -> None:
    # RecurrentGemma's attention fails on two simulated ranks, so tp is refused
    for sections in (MASKED, {**RING, **MASKED}, *([] if kind == "recurrent_gemma" else [TP])):
        began = time.process_time()
        check_family(kind, **sections)
        assert time.process_time() - began < 15  # at most 3 s on an idle machine
    divided = recurrent_blocks(family_meta(kind)).values()
    assert all(divided) if kind in DIVIDED_HEADS else not all(divided)


def test_one_of_two_ranks_adds_the_bias_of_divided_heads() -> None:
    assert all(recurrent_blocks(family_meta("bamba", mamba_proj_bias=True)).values())
    check_family("bamba", **TP, fields={"mamba_proj_bias": True})


def test_rounding_of_experts_products_is_no_recurrence() -> None:
    assert recurrent_blocks(family_meta("afmoe")) == {}


def test_a_state_that_crosses_documents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recurrent, "begin_micro_batch", lambda *_args, **_kwargs: None)
    for sections, field in ((MASKED, "data.mask_documents"), (RING, "parallel.cp")):
        with pytest.raises(ConfigError, match=f"(?s){field}.*bamba mix positions by other means than attention"):
            check_family("bamba", **sections)


@pytest.mark.parametrize("wrong", ["position", "order"])
def test_a_wrong_part_of_a_sequence_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    if wrong == "order":  # as if the ranks had contiguous parts
        monkeypatch.setattr(SequenceRanks, "_order", lambda _self, full: torch.arange(full.shape[1]))
    else:
        monkeypatch.setattr(SequenceRanks, "scattered", SequenceRanks.own)  # one rank's summand
    with pytest.raises(ConfigError, match=r"(?s)parallel.cp = 2.*two context-parallel ranks give another result"):
        check_family("lfm2", parallel={"cp": 2, "cp_method": "ring" if wrong == "order" else "ulysses"})


def test_heads_whose_rows_are_wrong_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_meta("lfm2", hidden_size=32, conv_L_cache=5)  # no other test's: results are cached
    monkeypatch.setattr(DividedRows, "of", lambda self, tensor, **_: tensor.narrow(self.dim, 0, self.size(2)))
    assert set(recurrent_blocks(model).values()) == {False}


def test_the_rows_of_a_fused_projection_are_those_of_a_ranks_heads() -> None:
    block = family_meta("bamba", mamba_n_groups=2).get_submodule("model.layers.0.mamba")
    rows = divided_rows(block, 2)
    assert rows is not None
    inner, states, heads = 128, 2 * 16, 8
    whole = torch.arange(2 * inner + 2 * states + heads)
    own = rows["in_proj.weight"].of(whole, rank=1, ranks=2)
    starts = (0, inner, 2 * inner, 2 * inner + states, 2 * inner + 2 * states)
    sizes = (inner, inner, states, states, heads)
    assert own.tolist() == [i for at, n in zip(starts, sizes, strict=True) for i in range(at + n // 2, at + n)]
    assert divided_rows(block, 3) is None
    one_group = divided_rows(family_meta("bamba").get_submodule("model.layers.0.mamba"), 2)
    assert one_group["conv1d.weight"].segments == ((inner, True), (16, False), (16, False))  # type: ignore[index]


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
    model = family_meta("nemotron_h")  # Mamba-2, experts, attention, MLP
    long, short = (measure(model, model.config, sequence_length=n).flops_per_token for n in (4096, 2048))  # type: ignore[arg-type]
    assert long - short == 12 * 64 * 2048  # type: ignore[operator]  # one layer with 4 heads of size 16
