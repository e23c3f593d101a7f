"""Every contract of CUDA is asserted on the fake device: a call that breaks it is refused, and the right one is not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

from foundation.errors import ConfigError
from pipeline.config.topology import Topology
from pipeline.plan.fake_gpu import exact, guard
from pipeline.plan.fake_gpu.contracts import table
from pipeline.plan.fake_gpu.contracts_collectives import Message, check_messages, check_splits
from tests.conftest import ROOT
from tests.plan.fake_gpu import contracts_page
from tests.support import output_of

pytestmark = pytest.mark.skipif(guard.missing() is not None, reason=guard.missing() or "")


def lines_of(module: str, *arguments: str) -> list[Any]:
    """What a module of this folder prints, as JSON lines."""
    command = [sys.executable, "-m", f"tests.plan.fake_gpu.{module}", *arguments]
    said = output_of(subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT))
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    [result] = lines_of("broken")
    return result


@pytest.mark.integration
def test_each_fault_breaks_its_contract_and_the_same_call_without_it_none(found: dict[str, Any]) -> None:
    for name, (contract, kept, broken) in found["cases"].items():
        assert kept == "", name
        assert broken.startswith(f"{contract}: "), (name, broken)
        assert "it demands: " in broken, name
        assert "Source: torch 2.13" in broken, name
    assert {contract for contract, *_ in found["cases"].values()} == {each.name for each in table()}


@pytest.mark.integration
def test_two_ranks_that_both_send_first_are_refused_unless_in_a_batch(found: dict[str, Any]) -> None:
    right, both_send, batched = found["messages"]
    assert (right, batched) == ([], [])
    assert both_send == ["message 0 between ranks 0 and 1 is not a send on one and a receive on the other"]


@pytest.fixture(scope="module")
def steps() -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in lines_of("contract_steps")}


@pytest.mark.integration
def test_steps_of_small_layouts_keep_all_contracts(steps: dict[str, dict[str, Any]]) -> None:
    kept = {name: each.get("error") for name, each in steps.items() if name != "as FSDP2"}
    assert kept == dict.fromkeys(("first", "last", "ring", "hpZ"))


@pytest.mark.integration
def test_the_ranks_of_a_pipeline_send_and_receive_in_one_order(steps: dict[str, dict[str, Any]]) -> None:
    topology = Topology(pp=2, dp=2, tp=2)
    ranks = [topology.rank(pp=number) for number in range(2)]
    of_steps = (steps[name]["report"]["messages"] for name in ("first", "last"))
    messages = {rank: [Message(*each) for each in found] for rank, found in zip(ranks, of_steps, strict=True)}
    assert all(len(each) == 30 for each in messages.values())
    assert list(check_messages(messages)) == []
    messages[ranks[1]].pop(0)
    wrong = f"message 0 between ranks {ranks[0]} and {ranks[1]} is not a send on one and a receive on the other"
    assert wrong in list(check_messages(messages))


@pytest.mark.integration
def test_a_gather_in_vain_is_a_race_and_check_exact_says_so(
    steps: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # FSDP2's own prefetch gathers another micro-batch's layer, and frees it while it arrives
    monkeypatch.setattr(exact, "run_cases", lambda _cases: [steps["as FSDP2"]])
    with pytest.raises(ConfigError) as refused:
        exact.execute(exact.RunInputs("run.json", (), 8, False, 128), ranks=[0], pp=2, engine="torch")
    said = str(refused.value)
    assert 'would go wrong on a GPU: contract "memory of another stream" is broken by all_gather_copy_in' in said
    assert "_allgather_base_ writes, with no event or wait between them" in said
    assert "Source: torch 2.13" in said


@pytest.mark.integration
def test_all_ranks_split_in_one_order() -> None:
    layouts = [Topology(pp=4, dp=2, cp=2), Topology(dp=4, tp=2, ep=2)]
    found = lines_of("split_order", *(json.dumps(asdict(each)) for each in layouts))
    for topology, said in zip(layouts, found, strict=True):
        splits = {int(rank): calls for rank, calls in said.items()}
        assert len(splits) == topology.world_size
        assert len(splits[0]) >= 5
        assert list(check_splits(splits)) == []
        splits[1] = splits[1][:1]
        assert list(check_splits(splits)) == ["ranks 0 and 1 split differently in call 1"]


def test_the_page_has_the_table() -> None:
    assert contracts_page.PAGE.read_text() == contracts_page.page(), "python -m tests.plan.fake_gpu.contracts_page"
