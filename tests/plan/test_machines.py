"""`headrace plan --machine A,B`: what the tokens of a run cost on several machines."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache

import pytest

from foundation.errors import ConfigError
from pipeline.plan import command_plan
from pipeline.plan.search.machines import Offer, Question, as_json, compare, lines, machines_of
from pipeline.runtime.machines.known import load_machine
from tests.plan.test_plan import planned

CONFIG = "llama_1b_zero3.json"
FREE = 0.05


@cache
def offers(
    *names: str, nodes: int | None = None, deadline: float | None = None
) -> tuple[list[Offer], dict[str, str], Question]:
    question = Question(nodes, deadline, FREE, {"h100": 2.5, "": 1.0})
    return *compare(planned(CONFIG, machine="h100"), names, question), question


def test_the_cheapest_machine_comes_first_and_every_layout_leaves_the_margin_free() -> None:
    found, without, question = offers("h100", "l40s", nodes=1)
    assert without == {}
    assert [each.cost for each in found] == sorted(each.cost for each in found)
    for each in found:
        assert each.plan.memory.peak.typical <= (1 - FREE) * load_machine(each.machine).memory.bytes
        hours = each.plan.gpu_hours.typical / each.failures.goodput
        assert each.cost == pytest.approx(hours * {"h100": 2.5}.get(each.machine, 1.0))
        assert each.run.batch.samples == planned(CONFIG, machine="h100").run.batch.samples
    table = "\n".join(lines(planned(CONFIG, machine="h100"), found, without, question))
    assert table.index(found[0].machine) < table.index(found[1].machine)
    assert [each["machine"] for each in as_json(found, without)["machines"]] == [each.machine for each in found]


def test_a_deadline_takes_more_nodes_and_is_kept() -> None:
    (one,), _, _ = offers("h100", nodes=1)
    deadline = 0.4 * one.failures.days.typical
    (found,), without, _ = offers("h100", deadline=deadline)
    assert without == {}
    assert found.failures.days.typical <= deadline
    (fewer,), _, _ = offers("h100", nodes=found.nodes // 2)
    assert fewer.failures.days.typical > deadline


@pytest.mark.integration
@pytest.mark.sweep
def test_what_is_never_in_time_or_fits_nowhere_is_named_with_the_reason() -> None:
    found, without, question = offers("h100", deadline=1e-4)
    assert found == []
    assert "the quickest takes" in without["h100"]
    large = planned("llama_70b_zero3.json", machine="h100", nodes=8)
    small = replace(question, nodes=1, deadline=None)
    found, without = compare(large, ["l4"], small)
    assert (found, without) == ([], {"l4": "1 nodes do not hold it"})


def test_all_are_the_gpus_that_are_known() -> None:
    found = machines_of("all")
    assert {"h100", "a100"} <= set(found)
    assert "cpu" not in found
    with pytest.raises(ConfigError, match="did you mean 'h200'"):
        machines_of("h100,h20")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--machine", "h100", "--deadline", "3"], "only when machines are compared"),
        (["--machine", "h100", "--price", "h100=2"], "prices by name are for several machines"),
        (["--machine", "all", "--search"], "--search is for one machine"),
        (["--machine", "all", "--deadline", "3", "--nodes", "2"], "give one of the two"),
        (["--machine", "all", "--price", "h100=cheap"], "not a finite number above 0"),
        (["--machine", "h100", "--memory-margin", "1"], "a share of a device's memory"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_torch_is_imported(options: list[str], said: str) -> None:
    parser = argparse.ArgumentParser()
    command_plan.add_arguments(parser)
    with pytest.raises(ConfigError, match=said):
        command_plan.run(parser.parse_args(["--config", "none.json", *options]))
