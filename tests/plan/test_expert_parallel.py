"""The planner knows expert parallelism: what a rank holds, what is sent over which links, how uneven the load is."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest

from foundation.errors import ConfigError
from pipeline.config.load import as_overrides
from pipeline.engines.sizes.expert_load import VIOLATION, expert_load
from pipeline.plan.imbalance import with_imbalance
from pipeline.plan.predict.communication import Transfer, transfers
from pipeline.plan.predict.memory_plan import typical_peak
from pipeline.plan.predict.plan import typical_time
from pipeline.plan.predict.planned_run import PlannedRun, open_run
from pipeline.plan.predict.rank_time import HOST_READ_S
from pipeline.plan.predict.rates import TYPICAL
from pipeline.plan.predict.simulated_step import SIMULATED
from pipeline.plan.predict.step_time import StepTime
from pipeline.plan.predict.work import work_of
from pipeline.plan.search.layouts import layouts
from pipeline.plan.search.search import search
from pipeline.plan.show import as_json, lines, report_of
from pipeline.runtime.machines.known import load_machine
from tests.conftest import ROOT

SMALL = (
    "model.config.num_hidden_layers=4",
    "zero_optimization.stage=3",
    "train_micro_batch_size_per_gpu=2",
    "parallel.ep_overlap=false",
)
EXPERT = 3 * 2048 * 768
"""Elements of an expert of Qwen3-30B-A3B."""


@cache
def planned(*overrides: str, imbalance: float | None = 1.0) -> PlannedRun:
    path = str(ROOT / "ds_configs/qwen3_moe_30b.json")
    return open_run(path, (*SMALL, *overrides), load_machine("h200"), nodes=8, imbalance=imbalance)


def sent(of: PlannedRun) -> list[Transfer]:
    return transfers(work_of(of.run, of.costs, 0).layout)


def time_of(of: PlannedRun) -> StepTime:
    return typical_time(of.run, of.costs, of.machine, model=SIMULATED)


@pytest.mark.parametrize(("ep", "within"), [(2, True), (8, True), (16, False), (64, False)])
def test_a_rank_holds_its_experts_which_are_sharded_over_the_ranks_with_the_same(ep: int, within: bool) -> None:
    rank = work_of(planned(f"parallel.ep={ep}").run, planned(f"parallel.ep={ep}").costs, 0).layout.rank
    assert rank.experts == (128 // ep * EXPERT,) * 4
    exchange, *_ = (each for each in sent(planned(f"parallel.ep={ep}")) if each.purpose == "experts")
    assert exchange.ranks == tuple(range(ep))
    assert (exchange.ranks[-1] < 8) == within
    weights = [each for each in sent(planned(f"parallel.ep={ep}")) if each.purpose == "weights"]
    groups = [each.ranks for each in weights]
    assert groups == [tuple(range(64))] + [tuple(range(0, 64, ep))] * (ep < 64)  # held by one rank, not gathered


def test_bytes_of_the_exchange_are_four_rows_per_chosen_expert_and_more_by_half_with_full_recomputation() -> None:
    found = {}
    for mode in ("none", "selective", "full"):
        of = planned("parallel.ep=8", f"memory.activation_checkpointing={mode}")
        tokens = of.run.batch.tokens / 64
        rows = next(each for each in sent(of) if each.purpose == "experts")
        found[mode] = rows.bytes / (tokens * 4 * 8 * 2048 * 2 * 4)  # layers, experts of a token, D, bytes, times
    assert found == {"none": 1.0, "selective": 1.0, "full": 1.5}


def test_hybrid_sharding_keeps_experts_within_a_replica() -> None:
    of = planned("parallel.ep=4", "parallel.hybrid_shard_size=8")
    assert of.run.expert_shards == 2
    groups = [(each.purpose, each.kind, each.ranks) for each in sent(of) if each.ranks[1] % 4 == 0]
    assert ("weights", "all_gather", (0, 4)) in groups
    assert ("gradients", "all_reduce", tuple(range(0, 64, 8))) in groups
    assert planned("parallel.ep=8", "zero_optimization.stage=0").run.expert_shards == 1


def test_experts_across_nodes_take_longer_than_within_one() -> None:
    near, far = (time_of(planned(f"parallel.ep={ep}")).expert_parallel for ep in (8, 16))
    assert far > 4 * near
    assert time_of(planned("parallel.ep=null", imbalance=None)).expert_parallel == 0


def test_an_uneven_load_takes_more_time_and_memory() -> None:
    of = planned("parallel.ep=8", "memory.activation_checkpointing=none", "loss.chunk=256")
    uneven = replace(of, run=with_imbalance(of.run, 2.0))
    rows = 8192 * 8 * 4  # of 4 layers
    more = typical_peak(uneven.run, of.costs, of.machine) - typical_peak(of.run, of.costs, of.machine)
    assert more == pytest.approx(rows * (2048 + 4 * 768) * 2, rel=0.1)  # fragmentation above it
    one, two = time_of(of), time_of(uneven)
    assert two.expert_parallel == pytest.approx(2 * one.expert_parallel, rel=0.1)
    assert two.products > 1.2 * one.products


def test_the_load_is_assumed_from_the_balance_up_to_its_bound_and_shown_with_its_source() -> None:
    of = planned("parallel.ep=64", imbalance=None)
    assert of.run.config.moe.balance == "aux_loss"
    load = expert_load(of.run, of.costs.widths)
    assert load.factor == pytest.approx(1 + VIOLATION["aux_loss"] / 2**0.5)
    assert load.most == 64 * 2 / 8
    unbalanced = planned("parallel.ep=64", "moe.balance=none", imbalance=None)
    assert expert_load(unbalanced.run, of.costs.widths).factor == pytest.approx(2.7, abs=0.01)
    assert expert_load(replace(of.run, imbalance=99.0), of.costs.widths).factor == load.most
    report = report_of(of)
    [line] = (each for each in lines(report) if "expert load" in each)
    assert "1.51 x the mean of rows (published for an auxiliary loss; 16 at most)" in line
    assert as_json(report)["expert_load"]["factor"] == load.factor


@pytest.mark.parametrize(("ep", "value", "why"), [(8, 0.5, "1 or more"), (1, 1.5, "without expert parallelism")])
def test_an_impossible_imbalance_is_refused(ep: int, value: float, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        with_imbalance(planned(f"parallel.ep={ep}", imbalance=None).run, value)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_an_exchange_beside_another_micro_batch_is_hidden_in_all_pairs_of_passes(mode: str) -> None:
    sets = ("zero_optimization.stage=2", f"memory.activation_checkpointing={mode}")
    of = planned(*sets, "parallel.ep_overlap=true")
    apart, beside = time_of(planned(*sets, "parallel.ep_overlap=false")), time_of(of)
    reads = HOST_READ_S * work_of(of.run, of.costs, 0).host_reads
    shares = {"none": 1.0, "selective": 1.0, "full": (3 / 4 + 1) / 3}  # of a pair's exchanges, with work between
    share = shares[mode] * of.machine.efficiency.overlap[TYPICAL] * (1 - 1 / of.run.batch.accumulation)
    assert beside.expert_parallel - reads == pytest.approx((1 - share) * (apart.expert_parallel - reads))
    assert (beside.products, beside.kernels) == (apart.products, apart.kernels)


def test_a_search_looks_at_legal_sizes_of_ep_of_a_mixture_alone() -> None:
    of = planned("parallel.ep=8")
    found = list(layouts(of.run, of.machine, experts=128))
    assert {each["parallel.ep"] for each in found if each["engine"] == "torch"} == {1, 4, 8, 16, 32, 64}
    assert {each["parallel.ep"] for each in found if each["parallel.pp"] == 4} <= {1, 4, 8, 16}
    assert all("parallel.ep" not in each for each in layouts(of.run, of.machine))
    overlapped = [each for each in found if each["parallel.ep_overlap"]]
    assert {(each["engine"], each["zero_optimization.stage"], each["parallel.pp"]) for each in overlapped} == {
        ("torch", 0, 1),
        ("torch", 1, 1),
        ("torch", 2, 1),
    }
    assert 1 not in {each["parallel.ep"] for each in overlapped}


@pytest.mark.parametrize(
    ("machine", "offered", "refused"),
    [
        ("h200", ("fp8.enabled=true",), None),
        ("l40s", ("fp8.enabled=true", "fp8.experts=false"), "fp8.experts = True"),
        ("b200", ("fp8.enabled=true", "fp8.experts=false"), "fp8.experts = True"),
        ("a100", (), "fp8.enabled = True"),
    ],
)
def test_a_search_offers_fp8_that_a_run_on_the_machine_accepts_and_a_plan_refuses_other(
    machine: str, offered: tuple[str, ...], refused: str | None
) -> None:
    def opened(*sets: str) -> PlannedRun:
        path = str(ROOT / "ds_configs/qwen3_moe_30b.json")
        return open_run(path, (*SMALL, "parallel.ep=null", *sets), load_machine(machine), nodes=None, processes=1)

    of = opened()
    fp8 = [
        {key: value for key, value in each.sets.items() if key.startswith("fp8.")}
        for each in search(of.run, of.costs, of.machine).candidates
    ]
    assert {tuple(as_overrides(sets)) for sets in fp8} == {(), offered}
    opened(*offered)
    with nullcontext() if refused is None else pytest.raises(ConfigError, match=refused):
        opened("fp8.enabled=true")


def test_experts_of_an_fp8_run_have_its_rate_but_for_their_weight_gradients() -> None:
    passes, seconds = {}, {}
    for name, sets in {
        "bf16": ("fp8.enabled=false",),
        "linear": ("fp8.enabled=true", "fp8.experts=false"),
        "all": ("fp8.enabled=true",),
    }.items():
        of = planned("parallel.ep=8", "memory.activation_checkpointing=none", *sets)
        decoder = work_of(of.run, of.costs, 0).stages[0].decoder
        passes[name], seconds[name] = (decoder.forward, decoder.backward), time_of(of).products
    (forward, backward), (in_fp8, weights) = passes["linear"], passes["all"]
    assert forward.unquantized > 0.5 * forward.products  # most of this model are experts
    assert (backward.unquantized, in_fp8.unquantized) == (2 * forward.unquantized, 0.0)
    assert weights.unquantized == forward.unquantized
    assert len({each[0].products for each in passes.values()}) == 1
    assert seconds["all"] < seconds["linear"] < seconds["bf16"]
