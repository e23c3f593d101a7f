"""Replica check: one flipped bit (silent data corruption) is found, and its rank and parameter are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.run.anomalies.replicas import fingerprint
from tests.engines.comparison import layout
from tests.run.anomalies.cases import run_cases

NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"

ON_TWO = {
    "torch, replicated weights": layout(0, engine="torch", micro=2, rank=1, name=NORM),
    "torch, tensor parallel": layout(3, engine="torch", micro=2, parallel={"tp": 2}, rank=0, name=NORM),
    "torch, tied embedding": layout(2, engine="torch", micro=2, parallel={"pp": 2}, rank=1, name=EMBEDDING),
    "ZeRO-0, bf16": layout(0, engine="deepspeed", micro=2, bf16={"enabled": True}, rank=1, name=NORM),
    "ZeRO-1, bf16": layout(1, engine="deepspeed", micro=2, bf16={"enabled": True}, rank=0, name=EMBEDDING),
    "ZeRO-2": layout(2, engine="deepspeed", micro=2, rank=1, name=NORM),
    "ZeRO-3, tensor parallel": layout(3, engine="deepspeed", micro=2, parallel={"tp": 2}, rank=1, name=NORM),
    "ZeRO-1, tied embedding": layout(1, engine="deepspeed", micro=2, parallel={"pp": 2}, rank=0, name=EMBEDDING),
}
ON_FOUR = {
    "torch, hybrid sharding": layout(3, engine="torch", micro=2, parallel={"hybrid_shard_size": 2}, rank=3, name=NORM),
    "ZeRO-2 on four": layout(2, engine="deepspeed", micro=2, rank=2, name=EMBEDDING),
}
FEW_REPLICAS = {"torch, tensor parallel", "ZeRO-3, tensor parallel", "torch, tied embedding", "ZeRO-1, tied embedding"}
"""Here only some parameters are on two ranks: norms, or the embedding and the head that is tied to it."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    work, results = tmp_path_factory.mktemp("replicas"), {}
    for processes, cases in ((2, ON_TWO), (4, ON_FOUR)):
        results |= run_cases("tests.run.anomalies.replicas", cases, work, processes=processes)
    return results


@pytest.mark.integration
@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_a_flipped_bit_is_found_by_all_ranks_and_named(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    ranks, flipped = results[name], {**ON_TWO, **ON_FOUR}[name]
    assert all(own["before"] == "" for own in ranks)
    assert len({own["after"] for own in ranks}) == 1
    message = ranks[0]["after"]
    assert f"{flipped['name']}: " in message
    assert message.count("model.") == 1
    if name == "ZeRO-2 on four":
        assert f"rank {flipped['rank']} of 0, 1, 2, 3" in message
    elif name != "torch, hybrid sharding":
        assert "ranks 0, 1 do not agree" in message
    if name not in FEW_REPLICAS:
        assert {NORM, EMBEDDING} < set(ranks[0]["names"])


def test_hybrid_sharding_compares_replicas_and_not_shards(results: dict[str, list[dict[str, Any]]]) -> None:
    assert "ranks 1, 3 do not agree" in results["torch, hybrid sharding"][0]["after"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_flipped_bit_and_an_exchange_of_elements_change_the_fingerprint(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    original = int(fingerprint(values))
    size = values.element_size() * 8
    for bit in range(size):
        other = values.clone()
        view = other.view({16: torch.int16, 32: torch.int32}[size])
        mask = 1 << bit if bit < size - 1 else -(1 << bit)
        view[bit * 7] ^= mask
        assert int(fingerprint(other)) != original, bit
    exchanged = values.clone()
    exchanged[[3, 4]] = exchanged[[4, 3]]
    assert int(fingerprint(exchanged)) != original
    assert int(fingerprint(values.clone())) == original
