"""The roofline of the committed kernels: its page, its FLOPs beside other counts, the page of experts."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.topology import Topology
from tests.plan.fake_gpu import expert_page
from tests.plan.fake_gpu.cells import GATHERED, measured
from tests.plan.fake_gpu.document import facts
from tests.plan.fake_gpu.links import NODE, sent
from tests.plan.fake_gpu.roofline import GPUS, least_time, model_flops, work_of
from tests.plan.fake_gpu.roofline_page import PAGE, kept, page
from tests.plan.fake_gpu.rows import ROWS

SHIPPED = [name for name, row in ROWS.items() if row.cell(0) in measured()]
DENSE = [name for name in SHIPPED if "moe" not in name]


@pytest.mark.integration
def test_the_page_has_the_roofline_of_the_committed_kernels() -> None:
    assert list(kept()) == list(ROWS)
    text = PAGE.read_text()
    assert page(text, kept()) == text, "run: python -m tests.plan.fake_gpu.roofline_page"


def test_a_roofline_without_recomputation_is_that_of_the_model_s_products() -> None:
    row = "llama_8b_h200.json, nothing recomputed"
    flops, _ = GPUS["H200"]
    time = least_time(row, kept()[row], gpu="H200")
    assert time.products == pytest.approx(model_flops(row, halves=1) / flops, rel=0.02)
    assert time.fused < 0.1 * time.products


@pytest.mark.parametrize("name", DENSE)
def test_the_products_of_compiled_layers_are_those_of_the_executed_step(name: str) -> None:
    # the later stages of DeepSpeed's pipeline are not executed on fake devices
    executed = [case for case in ROWS[name].stages() if ROWS[name].cell(case.pp_rank) in measured()]
    assert executed
    for case in executed:
        layout, _ = facts(case)
        run, rank, widths = layout.run, layout.rank, layout.widths
        full = run.config.memory.activation_checkpointing == "full"
        layers = len(rank.layers) * run.batch.accumulation * layout.tokens / run.topology.tp
        # causal attention counts in full in a step: 2 products forward, 5 backward, of 2 s h FLOPs per token
        half = layers * run.batch.sequence_length * 2 * widths.query * (2.5 + 1 + full)
        # DeepSpeed's hooks keep a recomputation from stopping before its last product, the MLP's
        last = layers * 2 * widths.hidden * widths.intermediate if full and run.config.engine == "deepspeed" else 0
        step = measured()[ROWS[name].cell(case.pp_rank) or ""]
        work = work_of(case, kept()[name], cell=None)
        assert work.flops + half + last == pytest.approx(step["flops"], rel=0.001), case.pp_rank


def test_layers_of_experts_are_compiled_within_their_checkpoint() -> None:
    """The graphs of the forward pass run again in the backward pass; only the router's hook is in none."""
    checkpointed, plain = (kept()[name] for name in (GATHERED, f"{GATHERED}, nothing recomputed"))

    def products(graphs: list[dict[str, Any]], *, backward: bool) -> float:
        chosen = [graph for graph in graphs if graph["part"] == "layers" and graph["backward"] is backward]
        return sum(graph["calls"] * sum(flops for flops, _ in graph["products"]) for graph in chosen)

    assert products(checkpointed, backward=False) == 2 * products(plain, backward=False) > 0
    assert products(checkpointed, backward=True) == products(plain, backward=True) > 0


def test_a_ring_sends_what_a_rank_lacks_and_an_all_reduce_twice_that() -> None:
    gather, scatter, reduce = sent(
        Topology(dp=4), [("all_gather", "world", 4000), ("reduce_scatter", "world", 4000), ("all_reduce", "world", 400)]
    )
    assert (gather.bytes, scatter.bytes, reduce.bytes) == (3000, 3000, 600)
    assert gather.within
    assert gather.seconds("H200") == 3000 / 450e9


def test_a_group_that_spans_nodes_has_the_adapters_of_its_ranks_in_a_node() -> None:
    topology = Topology(pp=2, dp=8, tp=NODE)
    rows = [("all_gather", "tp", 800), ("all_gather", "dp", 800), ("all_gather", "dp x tp", 800), ("send", "pp", 100)]
    tensor, data, both, stage = sent(topology, [*rows, ("recv", "pp", 100)])
    assert (tensor.within, data.within, both.within, stage.within) == (True, False, False, False)
    assert (data.per_node, both.per_node, stage.per_node) == (1, NODE, 1)
    assert data.seconds("H200") == 700 / 50e9
    assert both.seconds("H200") == both.bytes / 400e9
    assert stage.bytes == 100
    assert [each.exposed for each in (tensor, data, both, stage)] == [True, False, False, False]


@pytest.mark.integration
@pytest.mark.sweep
def test_the_page_of_experts_shows_what_the_planner_says() -> None:
    text = expert_page.PAGE.read_text()
    assert text == expert_page.page(text), "run: python -m tests.plan.fake_gpu.expert_page"
