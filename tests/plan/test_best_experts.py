"""Experts in the best published engines: tokens sent once to a node, slower grouped products, dispatch of layers."""

from __future__ import annotations

import itertools
import json
import re
import statistics

import pytest

from pipeline.plan.predict.expert_exchange import _places, deduplicated_s
from pipeline.plan.predict.plan import make_plan, run_rates
from pipeline.plan.predict.rates import TYPICAL
from pipeline.plan.predict.work import work_of
from pipeline.runtime.machines.machine import Machine
from tests.conftest import ROOT
from tests.plan.test_expert_parallel import planned, sent, time_of


@pytest.mark.parametrize(("number", "chosen"), [(1, 3), (2, 3), (4, 2), (8, 3)])
def test_a_token_is_on_as_many_places_as_counted_over_all_choices(number: int, chosen: int) -> None:
    choices = itertools.product(range(number), repeat=chosen)
    assert _places(number, chosen) == pytest.approx(statistics.mean(len(set(each)) for each in choices))


@pytest.mark.parametrize(("ep", "far"), [(8, False), (16, True)])
def test_an_exchange_that_sends_a_token_once_to_a_node_takes_the_slower_link(ep: int, far: bool) -> None:
    of = planned(f"parallel.ep={ep}")
    rates = run_rates(of.run, of.costs, of.machine, TYPICAL)
    rows = next(each for each in sent(of) if each.purpose == "experts")
    seconds = deduplicated_s(rows, work_of(of.run, of.costs, 0).layout, rates)
    if far:
        link, sent_to = rates.topology.between, (2 - 2 / 2**8) / 2  # of two nodes one is the rank's own
    else:
        link, sent_to = rates.topology.within, 8 * (1 - (7 / 8) ** 8) * 7 / 8
    assert seconds == pytest.approx(rows.bytes / 8 * sent_to / link.bandwidth + rows.count * link.latency_s)


def test_deepep_takes_less_time_across_nodes_than_an_all_to_all_which_sends_every_row() -> None:
    rows, tokens = (
        time_of(planned("parallel.ep=16", f"parallel.ep_exchange={name}")) for name in ("all_to_all", "deepep")
    )
    assert tokens.expert_parallel < rows.expert_parallel / 3
    assert tokens.products == rows.products


def _with(machine: Machine, **changes: object) -> Machine:
    return machine.model_copy(update={"efficiency": machine.efficiency.model_copy(update=changes)})


@pytest.mark.parametrize(("dense", "sparse"), [("[]", 4), ("[0,1,2]", 1)])
def test_grouped_products_at_half_the_rate_take_twice_their_time(dense: str, sparse: int) -> None:
    of = planned("parallel.ep=8", f"model.config.mlp_only_layers={dense}")
    half = _with(of.machine, experts=(0.5, 0.5, 0.5))
    whole, slow = (make_plan(of.run, of.costs, each).step["products"].typical for each in (of.machine, half))
    tokens, flops = of.run.batch.tokens / 64, 8 * 3 * 2 * 2048 * 768
    rate = run_rates(of.run, of.costs, of.machine, TYPICAL).products
    assert slow - whole == pytest.approx(sparse * 3 * tokens * flops / rate)


@pytest.mark.parametrize(("dense", "sparse"), [("[]", 4), ("[0]", 3)])
def test_a_layer_with_experts_takes_its_dispatch_at_least(dense: str, sparse: int) -> None:
    of = planned("parallel.ep=8", "train_micro_batch_size_per_gpu=1", f"model.config.mlp_only_layers={dense}")
    plan = make_plan(of.run, of.costs, _with(of.machine, expert_layer_s=(0.05, 0.1, 0.2)))
    inside = sum(plan.step[name].typical for name in ("products", "kernels", "expert_parallel"))
    least = sparse * of.run.batch.accumulation * 0.1
    assert least < inside < 1.2 * least  # the head comes on top
    assert plan.step_s.low < 0.6 * plan.step_s.typical < 0.4 * plan.step_s.high


def test_every_published_run_of_experts_names_its_version_and_date_and_half_are_unseen() -> None:
    known = json.loads((ROOT / "benchmarks/published_runs.json").read_text())
    runs = [run for run in known["runs"] if any(each.startswith("parallel.ep=") for each in run["overrides"])]
    assert all(re.search(r"20\d\d-\d\d", run["name"]) for run in runs)
    unseen = [run for run in runs if not run["fitted"]]
    assert len(unseen) >= max(20, len(runs) / 2)
    assert not {run["name"].split(",")[0] for run in unseen if run["best"]} & {
        run["name"].split(",")[0] for run in runs if run["fitted"]
    }, "the larger models are unseen as a whole"
