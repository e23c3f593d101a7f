"""Shipped configs, shrunk, train a few steps and follow one plain process, in their own precision.

CI runs `zero3.json`; `make sweep-tests` the others, whose layouts `test_matrix.py` has.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from pipeline.plan.proof.case import Case
from pipeline.plan.proof.equivalence import ProofResult, check_equivalence
from pipeline.plan.proof.shrunk_run import SEQUENCE, VOCABULARY, ShrunkRun, shrink_run
from pipeline.plan.proof.tokens import write_tokens
from tests.config.rules.test_layouts import shipped
from tests.conftest import ROOT, selected
from tests.engines.comparison import layout_params
from tests.parity.run import failure_text, launch

STEPS = 5
IN_CI = {
    "zero3.json",
}


def shrunk(name: str, processes: int, work: Path) -> ShrunkRun:
    return shrink_run(resolve(load_config(ROOT / "ds_configs" / name), world_size=processes), steps=STEPS, work=work)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProofResult]:
    work = tmp_path_factory.mktemp("shipped")
    tokens = write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=4_000, longest=2 * SEQUENCE)
    cases: list[Case] = []
    names = selected(request.session, test_a_shrunk_shipped_config_follows_the_reference, "name")
    for name in names:
        small = shrunk(name, shipped()[name], work)
        precisions = sorted({"fp32", small.precision})
        cases += [small.reference(f"{name}-{p}", precision=p, tokens=tokens) for p in precisions]
        cases.append(small.layout(name, precision=small.precision, tokens=tokens))
    found = launch(cases, work)
    return {
        name: check_equivalence(
            found[name], found[f"{name}-{precision_of(name, found)}"], fp32_reference=found[f"{name}-fp32"]
        )
        for name in names
    }


def precision_of(name: str, found: dict[str, object]) -> str:
    return next(p for p in ("bf16", "fp16", "fp32") if f"{name}-{p}" in found)


@pytest.mark.parametrize("name", layout_params(set(), shipped(), integration=IN_CI))
def test_a_shrunk_shipped_config_follows_the_reference(results: dict[str, ProofResult], name: str) -> None:
    assert results[name].passed, failure_text(name, results[name])


def test_a_shrunk_config_keeps_its_layout(tmp_path: Path) -> None:
    small = shrunk("llama_70b_fsdp_3d.json", 512, tmp_path)
    assert str(small.topology) == "pp 2 x dp 2 x tp 2"
    assert small.precision == "bf16"
    assert small.config["parallel"] == {
        "pp": 2,
        "tp": 2,
        "cp": 1,
        "schedule": "interleaved_1f1b",
        "cp_method": "ulysses",
        "virtual_stages": 2,
    }
    assert small.config["memory"]["activation_checkpointing"] == "selective"
    assert small.config["gradient_accumulation_steps"] > 1
    assert 0 < small.config["loss"]["chunk"] < SEQUENCE
    assert small.config["model"]["config"]["num_hidden_layers"] < 10
