"""Every shipped config, made small, trains a few steps and follows one plain process, in its own precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import load_config
from pipeline.config.rules import resolve
from pipeline.proof.case import Case
from pipeline.proof.judgement import ProofResult, judge
from pipeline.proof.small import SEQUENCE, VOCABULARY, Small, make_small
from pipeline.proof.tokens import write_tokens
from tests.config.test_layouts import shipped
from tests.conftest import ROOT
from tests.parity.run import launch, told

STEPS = 5


def small(name: str, processes: int, work: Path) -> Small:
    return make_small(resolve(load_config(ROOT / "ds_configs" / name), world_size=processes), steps=STEPS, work=work)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProofResult]:
    """All shipped configs in one launch."""
    work = tmp_path_factory.mktemp("shipped")
    tokens = write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=4_000, longest=2 * SEQUENCE)
    cases: list[Case] = []
    for name, processes in shipped().items():
        made = small(name, processes, work)
        precisions = sorted({"fp32", made.precision})
        cases += [made.reference(f"{name}-{p}", precision=p, tokens=tokens) for p in precisions]
        cases.append(made.layout(name, precision=made.precision, tokens=tokens))
    found = launch(cases, work)
    return {
        name: judge(found[name], found[f"{name}-{precision_of(name, found)}"], exact=found[f"{name}-fp32"])
        for name in shipped()
    }


def precision_of(name: str, found: dict[str, object]) -> str:
    return next(p for p in ("bf16", "fp16", "fp32") if f"{name}-{p}" in found)


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_config_made_small_follows_the_reference(verdicts: dict[str, ProofResult], name: str) -> None:
    assert verdicts[name].holds, told(name, verdicts[name])


def test_made_small_a_config_keeps_its_layout(tmp_path: Path) -> None:
    made = small("llama_70b_fsdp_3d.json", 512, tmp_path)
    assert str(made.topology) == "pp 2 x dp 2 x tp 2"
    assert made.precision == "bf16"
    assert made.config["parallel"] == {
        "pp": 2,
        "tp": 2,
        "cp": 1,
        "schedule": "interleaved_1f1b",
        "cp_method": "ulysses",
        "virtual_stages": 2,
    }
    assert made.config["memory"]["activation_checkpointing"] == "selective"
    assert made.config["gradient_accumulation_steps"] > 1
    assert 0 < made.config["loss"]["chunk"] < SEQUENCE
    assert made.config["model"]["config"]["num_hidden_layers"] < 10
