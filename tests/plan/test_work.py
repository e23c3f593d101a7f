"""What the plan says a rank computes and sends is what a step on fake tensors did; Muon's share of it is counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foundation.section import parse
from pipeline.config.load import as_overrides, changed
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.engines.optim.newton_schulz import flops
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.memory import peak_memory
from pipeline.plan.fake_gpu.case import StepCase
from pipeline.plan.predict.communication import transfers
from pipeline.plan.predict.model_costs import ModelCosts
from pipeline.plan.predict.work import Work, work_of
from tests import warm
from tests.conftest import ROOT, tiny_config, write_config
from tests.plan.fake_gpu.cells import measured, shipped_cases
from tests.plan.fake_gpu.document import built, purpose_of
from tests.plan.fake_gpu.roofline import work_of as lowered_work
from tests.plan.fake_gpu.roofline_page import kept
from tests.plan.fake_gpu.rows import ROWS
from tests.support import output_of

CELLS = {name: case for name, case in shipped_cases().items() if name in measured()}
PURPOSE = {
    "tensor parallelism, gathers": "tensor",
    "tensor parallelism, scatters": "tensor",
    "context parallelism": "context",
    "context parallelism, gradients": "context",
    "expert parallelism": "experts",
    "expert parallelism, sizes": "experts",
    "weights of experts": "weights",
    "gradients of experts": "gradients",
    "pipeline, sent": "pipeline",
    "weights": "weights",
    "gradients": "gradients",
}
"""Purpose of an executed collective -> of a transfer."""


@cache
def planned(case: StepCase) -> Work:
    run, model = built(case)
    # steps on fake tensors are eager, so that operators are seen
    run = replace(run, config=changed(run.config, {"compile.enabled": None}))
    return work_of(run, ModelCosts.of(model, sequence_length=run.batch.sequence_length), case.pp_rank)


@pytest.mark.parametrize("name", CELLS)
def test_products_are_those_of_the_executed_step(name: str) -> None:
    work = planned(CELLS[name])
    # an executed step counts causal attention in full, the plan the half that kernels compute
    passes = (work.forward, work.backward)
    flops = work.layout.micro_batches * sum(each.products + 2 * each.attention for each in passes)
    assert flops == pytest.approx(measured()[name]["flops"], rel=0.02)


@pytest.mark.parametrize("name", CELLS)
def test_bytes_of_collectives_are_those_of_the_executed_step(name: str) -> None:
    work, sent = planned(CELLS[name]), Counter()
    for kind, axes, dtype, _, size in measured()[name]["collectives"]:
        if purpose := PURPOSE.get(purpose_of(kind, axes, dtype, size)):
            sent[purpose] += size
    found = Counter()
    for each in transfers(work.layout):
        found[each.purpose] += each.bytes
    assert set(found) == set(sent)
    for purpose, size in sent.items():
        assert found[purpose] == pytest.approx(size, rel=0.15), purpose


def test_messages_of_ring_attention_are_repeated_by_selective_checkpointing_too_and_exchanges_of_ulysses_are_not() -> (
    None
):
    found = {}
    for method in ("ring", "ulysses"):
        for mode in ("none", "selective", "full"):
            sets = {"parallel.cp": 2, "parallel.cp_method": method, "memory.activation_checkpointing": mode}
            case = StepCase(
                "ds_configs/llama_8b_8gpu.json", 8, overrides=(*as_overrides(sets), "data.sequence_length=8192")
            )
            found[method, mode] = sum(
                each.bytes for each in transfers(planned(case).layout) if each.purpose == "context"
            )
    ring = [found["ring", mode] / found["ring", "none"] for mode in ("selective", "full")]
    # keys and values of 2 bytes to the other rank in three passes rather than two, and gradients of 4 bytes in 2 hops
    assert ring == pytest.approx([(3 * 2 + 2 * 4) / (2 * 2 + 2 * 4)] * 2)
    ulysses = [found["ulysses", mode] / found["ulysses", "none"] for mode in ("selective", "full")]
    assert ulysses == pytest.approx([1.0, 1.5])


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if "1b" not in name and "moe" not in name])
def test_bytes_of_other_kernels_are_those_of_compiled_layers_within_a_quarter(row: str) -> None:
    case = ROWS[row].whole
    work = planned(case)
    lowered = lowered_work(case, kept()[row], cell=ROWS[row].traffic_cell(case.pp_rank))
    found = work.layout.micro_batches * (work.forward.kernel_bytes + work.backward.kernel_bytes)
    assert found == pytest.approx(lowered.kernel_bytes, rel=0.25)


MUON: dict[str, Any] = {"type": "Muon", "params": {"lr": 3e-3}}


def test_check_lists_the_matrices_and_counts_the_states_of_each_kind(tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch", optimizer=MUON))
    said = json.loads(output_of(warm.run("-m", "pipeline", "check", "--config", config, "--json")))
    layers, matrices = 2, 2 * 48 * 48 + 2 * 24 * 48 + 3 * 96 * 48  # q and o, k and v, the MLP
    assert said["matrices"] == {
        "matrices": 7 * layers,
        "parameters": 7 * layers,
        "elements": layers * matrices,
        "fused": [],
    }
    parameters = said["model"]["parameters"]
    assert said["training_state"]["bytes"] == 8 * layers * matrices + 12 * (parameters - layers * matrices)


@pytest.mark.parametrize(
    ("params", "hold"),
    [({}, True), ({"adjust_lr": "original"}, False), ({"muon_lr": 6e-3}, False), ({"muon_lr": 3e-3}, True)],
)
def test_the_laws_of_adamw_hold_where_updates_are_as_large_as_its_own(params: dict[str, Any], hold: bool) -> None:
    section = parse(OptimizerSection, {"type": "Muon", "params": {**MUON["params"], **params}})
    assert section.has_adamw_rates == hold


def test_check_lists_what_qk_clip_watches(tokens: Path, tmp_path: Path) -> None:
    clipped = {**MUON, "params": {**MUON["params"], "qk_clip": 100}}
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch", optimizer=clipped))
    said = json.loads(output_of(warm.run("-m", "pipeline", "check", "--config", config, "--json")))
    assert said["qk_clip"] == {"threshold": 100.0, "layers": 2, "key_heads": 4, "parameters": 4}
    assert said["optimizer"]["params"]["qk_clip"] == 100.0


def with_muon(*overrides: str, processes: int = 8) -> Work:
    optimizer = f"optimizer={json.dumps(MUON)}"
    file = str(ROOT / "ds_configs/llama_8b_8gpu.json")
    run, model = built(StepCase(file, processes, overrides=(optimizer, "train_batch_size=64", *overrides)))
    return work_of(run, ModelCosts.of(model, sequence_length=run.batch.sequence_length), 0)


MATRICES = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
PRODUCTS = 32 * (2 * flops(4096, 4096) + 2 * flops(1024, 4096) + 3 * flops(14336, 4096))


def exchanged(work: Work) -> list[tuple[float, int, int]]:
    return [(each.bytes, each.count, len(each.ranks)) for each in transfers(work.layout) if each.purpose == "matrices"]


def test_the_products_are_divided_over_the_ranks_until_each_has_one_matrix() -> None:
    assert flops(4096, 14336) == 20 * 4096**2 * 14336 + 10 * 4096**3
    assert with_muon().matrix_flops == PRODUCTS / 8
    assert with_muon(processes=64).matrix_flops == PRODUCTS / 64
    many = with_muon("train_batch_size=256", processes=256)
    assert many.matrix_flops == flops(14336, 4096)


def test_shards_travel_once_to_their_owners_and_once_back_in_bf16() -> None:
    assert exchanged(with_muon()) == [(2 * 2 * MATRICES / 8, 2, 8)]
    assert exchanged(with_muon("parallel.tp=2")) == [(2 * 2 * MATRICES / 2 / 4, 2, 8)]
    # hybrid sharding: one replica's shards there, the results to every replica
    assert exchanged(with_muon("parallel.hybrid_shard_size=4")) == [(2 * (MATRICES / 8 + MATRICES / 4), 2, 8)]
    assert exchanged(with_muon("zero_optimization.stage=0")) == [(2 * MATRICES, 1, 8)]


def test_the_largest_logits_are_the_scores_once_more_in_the_forward_pass() -> None:
    plain, clipped = with_muon(), with_muon("optimizer.params.qk_clip=100")
    tokens, scores = 8192, 32 * 32 * 8192 / 2  # of one sequence; of all layers and heads, the causal half
    assert clipped.forward.attention - plain.forward.attention == pytest.approx(tokens * scores * 2 * 128)
    assert clipped.forward.attention == pytest.approx(1.5 * plain.forward.attention)
    assert clipped.forward.kernel_bytes - plain.forward.kernel_bytes == pytest.approx(tokens * scores * 4)
    assert clipped.backward == plain.backward


def test_a_momentum_takes_four_bytes_less_than_two_moments() -> None:
    file = str(ROOT / "ds_configs/llama_8b_8gpu.json")
    (run, model), (adamw, _) = (
        built(StepCase(file, 8, overrides=overrides)) for overrides in ((f"optimizer={json.dumps(MUON)}",), ())
    )
    footprints = footprint_of(run, model), footprint_of(adamw, model)
    assert footprints[0] is not None
    assert footprints[1] is not None
    with_muon, plain = peak_memory(run, footprints[0]), peak_memory(adamw, footprints[1])
    assert plain.optimizer - with_muon.optimizer == pytest.approx(4 * MATRICES / 8)
