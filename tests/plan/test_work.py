"""What the plan says a rank computes and sends is what a step executed on fake tensors did."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from pipeline.config.load import as_overrides, changed
from pipeline.plan.fake_gpu.case import StepCase
from pipeline.plan.predict.communication import transfers
from pipeline.plan.predict.model_costs import ModelCosts
from pipeline.plan.predict.work import Work, work_of
from tests.plan.fake_gpu.cells import measured, shipped_cases
from tests.plan.fake_gpu.document import built, purpose_of
from tests.plan.fake_gpu.roofline import work_of as lowered_work
from tests.plan.fake_gpu.roofline_page import kept
from tests.plan.fake_gpu.rows import ROWS

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
