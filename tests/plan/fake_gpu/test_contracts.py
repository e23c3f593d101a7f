"""Every contract of CUDA is asserted on the fake device: a call that breaks it is refused, and the right one is not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from pipeline.plan.fake_gpu import guard
from pipeline.plan.fake_gpu.contracts import table
from tests.conftest import ROOT
from tests.support import output_of

pytestmark = pytest.mark.skipif(guard.missing() is not None, reason=guard.missing() or "")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.plan.fake_gpu.broken"]
    said = output_of(subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT))
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
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
