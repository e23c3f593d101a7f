"""The sweep over families: what once trained trains, and one cell of every kind runs here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sweeps.all_sweeps import SWEEPS
from tests.sweeps.families import LEAST_TRAINED, tiny_fields
from tests.sweeps.run_families import FURTHER, LAYOUTS, failure, run_family

KINDS = {
    "ministral3": "sdpa",  # attention of our own
    "gpt_oss": "eager",  # attention sinks: eager
    "mamba2": "sdpa",  # no attention heads, an infinity in its config
    "deepseek_v3": "sdpa",  # a router's bias, which is a persistent buffer
    "afmoe": "eager",  # a frozen parameter
    "zamba": "sdpa",  # parameters that layers share
    "dbrx": "sdpa",  # modules that run depending on the data, which ZeRO-3 must gather at once
}
IN_CI = {"gpt_oss", "deepseek_v3", "mamba2"}
"""The others run with `make sweep-tests`, and all families with `make sweep-families`."""


def test_the_number_of_families_that_train_never_falls() -> None:
    text = SWEEPS["families"]().table_file.read_text()
    found = re.search(r"of which (?P<run>\d+) were run and (?P<passed>\d+) passed", text)
    assert found is not None
    assert int(found["passed"]) >= LEAST_TRAINED


def test_a_tiny_model_keeps_what_selects_code_paths_and_has_no_dropout() -> None:
    fields = tiny_fields("gpt2")
    assert fields["n_embd"] == 64
    assert fields["resid_pdrop"] == 0.0
    assert "activation_function" not in fields


def test_a_refusal_is_told_by_its_reason_and_a_fault_by_its_exception() -> None:
    assert failure("ZeRO-1", 2, "model.config.x = 1\n  why: it is odd\n  try: 2") == "refused: it is odd"
    output = "Traceback\n  File x\n[rank1]: ValueError: broken\nmore"
    assert failure("ZeRO-1", 1, output) == "ZeRO-1 ended with code 1: [rank1]: ValueError: broken"


@pytest.mark.integration
@pytest.mark.parametrize(
    "kind", [each if each in IN_CI else pytest.param(each, marks=pytest.mark.sweep) for each in KINDS]
)
def test_a_family_of_every_kind_trains_is_exported_and_loaded_with_its_loss(
    kind: str, tokens: Path, tmp_path: Path
) -> None:
    name = {"gpt_oss": "ZeRO-1", "afmoe": "ZeRO-1", "mamba2": "FSDP2", "zamba": "FSDP2"}.get(kind, "ZeRO-3")
    result = run_family(kind, tokens, tmp_path, layouts={name: LAYOUTS[name]})
    assert result.trained, result.note
    assert result.note.startswith(KINDS[kind])


@pytest.mark.integration
@pytest.mark.parametrize(
    "kind", ["phi3", pytest.param("smollm3", marks=pytest.mark.sweep)]
)  # longrope that crosses its threshold; layers without RoPE
def test_a_family_trains_with_its_sequence_divided_and_from_some_of_its_layers(
    kind: str, tokens: Path, tmp_path: Path
) -> None:
    result = run_family(kind, tokens, tmp_path, layouts={"FSDP2": LAYOUTS["FSDP2"], **FURTHER})
    assert result.trained, result.note
    assert re.fullmatch(r"sdpa; FSDP2 (\d\.\d+), cp 2 \1, layers dropped \d\.\d+", result.note), result.note


@pytest.mark.integration
def test_a_model_that_sees_later_tokens_is_refused_before_it_trains(tokens: Path, tmp_path: Path) -> None:
    result = run_family("cpmant", tokens, tmp_path)
    assert (result.trained, result.note.split(",")[0]) == (False, "refused: it sees the tokens to its right")
