"""Compares machines for a run: nodes, layout, time and money on each, in one table."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foundation.errors import ConfigError
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.plan.predict.failures import UnderFailures, under_failures
from pipeline.plan.predict.interval import days_text, hours_text
from pipeline.plan.predict.memory_plan import with_margin
from pipeline.plan.predict.plan import Plan, make_plan
from pipeline.plan.predict.planned_run import PlannedRun, check_fp8_machine
from pipeline.plan.search.changes import applied, nearest_change
from pipeline.plan.search.fewest_nodes import MOST_NODES, fastest_that_fits, fewest_nodes, undivided
from pipeline.plan.search.search import in_layout
from pipeline.plan.show import money_of
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.runtime.machines.known import known_machines, load_machine
from pipeline.runtime.machines.machine import Machine
from pipeline.runtime.machines.ranks import with_ranks

_CHANGES = 8
"""Most changes of the layout; each is the one that helps most."""
_HEAD = ("machine", "nodes", "peak", "step", "tokens/s", "time and goodput", "GPU-hours")


@dataclass(frozen=True)
class Question:
    """Requirements for every machine.

    Attributes:
        nodes: number of nodes; None for the fewest that hold the model, or the cheapest number that meets the deadline.
        deadline: days within which the run has to end, failures included, at the slowest; None for no limit.
        margin: share of a device's memory that stays free.
        prices: machine -> price of a GPU-hour; "" is for machines without a price of their own.
    """

    nodes: int | None
    deadline: float | None
    margin: float
    prices: Mapping[str, float]

    def price(self, machine: str) -> float | None:
        """Price of a GPU-hour of a machine; None where it was not given."""
        return self.prices.get(machine, self.prices.get(""))


@dataclass(frozen=True)
class Offer:
    """A machine, with the layout, the plan and the cost of the run on it.

    Attributes:
        machine: name of the machine.
        nodes: number of nodes.
        run: the run in the layout that was found.
        plan: plan of the run in that layout.
        failures: goodput, time and GPU-hours with failures of nodes.
        price: price of a GPU-hour; None where it was not given.
    """

    machine: str
    nodes: int
    run: ResolvedRun
    plan: Plan
    failures: UnderFailures
    price: float | None

    @property
    def cost(self) -> float:
        """Cost in money, or in GPU-hours without a price; typical, failures included."""
        return self.failures.gpu_hours.typical * (1.0 if self.price is None else self.price)


def machines_of(names: str) -> list[str]:
    """The machines of `--machine A,B,FILE`, or all known GPUs for `all`.

    Raises:
        ConfigError: a machine is unknown.
    """
    if names.strip().lower() == "all":
        return [name for name in known_machines() if load_machine(name).gpu]
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        load_machine(name)
    return found


def compare(planned: PlannedRun, names: Sequence[str], question: Question) -> tuple[list[Offer], dict[str, str]]:
    """Offers of the machines, the cheapest first, and reasons why other machines have none."""
    offers, without = [], {}
    for name in names:
        print(f"planning on {name} ...", file=sys.stderr, flush=True)
        try:
            offers.append(_offer(planned, name, question))
            print(f"{name}: {_line(offers[-1])}", file=sys.stderr, flush=True)
        except ConfigError as error:
            without[name] = error.why
        except KeyboardInterrupt:
            without |= dict.fromkeys(names[len(offers) + len(without) :], "not planned: Ctrl-C")
            break
    priced = all(each.price is not None for each in offers)
    return sorted(offers, key=lambda each: each.cost if priced else each.failures.gpu_hours.typical), without


def _offer(planned: PlannedRun, name: str, question: Question) -> Offer:
    machine = load_machine(name)
    check_fp8_machine(planned.run.config.fp8, planned.costs.model, machine)
    power = 1 << (machine.devices_per_node.bit_length() - 1)
    if planned.run.batch.samples % machine.devices_per_node:  # e.g. 64 of the 72 GPUs of an NVLink domain
        machine = machine.model_copy(update={"devices_per_node": power})
    on_this = replace(planned, machine=with_margin(machine, question.margin))
    if question.nodes is not None:
        offer = _on(on_this, question.nodes, name, question)
        if offer is None:
            why = f"{question.nodes} nodes do not hold it"
            ranks = question.nodes * machine.devices_per_node
            if planned.run.batch.samples % ranks:
                why += f", or {undivided(planned, ranks)}"
            raise ConfigError("--nodes", question.nodes, why=why, remedy="another number")
        return offer
    fewest = fewest_nodes(on_this)
    if fewest is None:
        raise ConfigError("--machine", name, why=_no_fit(planned, machine), remedy="another machine")
    if question.deadline is None:
        offer = _on(on_this, fewest[0], name, question)
        assert offer is not None  # the layout on the fewest nodes fits
        return offer
    return _by_deadline(on_this, fewest[0], name, question, deadline=question.deadline)


def _no_fit(planned: PlannedRun, machine: Machine) -> str:
    samples, devices = planned.run.batch.samples, machine.devices_per_node
    return (
        f"no layout on 1 to {MOST_NODES:,} nodes of {devices}: a rank needs more than a device has, or the batch of"
        f" {samples:,} samples does not divide over the ranks"
    )


def _by_deadline(planned: PlannedRun, nodes: int, name: str, question: Question, *, deadline: float) -> Offer:
    """The cheapest offer that ends in time: nodes are doubled, then numbers between the last two are tried."""
    tried: dict[int, Offer] = {}

    def in_time(count: int) -> bool:
        offer = _on(planned, count, name, question)
        if offer is not None:
            tried[count] = offer
        return offer is not None and offer.failures.days.high <= deadline

    fewest = nodes
    while not in_time(nodes):
        if nodes * 2 > MOST_NODES:
            best = min((each.failures.days.high for each in tried.values()), default=float("inf"))
            why = (
                f"no number of nodes up to {MOST_NODES:,} is done in {deadline:g} days: the quickest takes {best:,.1f}"
            )
            raise ConfigError("--deadline", deadline, why=why, remedy="a later one, or a larger batch")
        nodes *= 2
    if nodes > fewest:
        for count in sorted({nodes * eighths // 8 for eighths in (5, 6, 7)} - {nodes, nodes // 2}):
            in_time(count)
    return min((each for each in tried.values() if each.failures.days.high <= deadline), key=lambda each: each.cost)


def _on(planned: PlannedRun, nodes: int, name: str, question: Question) -> Offer | None:
    """The run on `nodes` nodes; None where no layout fits or the batch does not divide over them."""
    per_node = planned.machine.devices_per_node
    machine = with_ranks(planned.machine, per_node)
    start = _start(replace(planned, machine=machine), nodes)
    if start is None:
        return None
    run, plan = start
    for _ in range(_CHANGES):
        change = nearest_change(run, planned.costs, machine, plan)
        if change is None:
            break
        run = applied(run, change.sets)
        plan = make_plan(run, planned.costs, machine)
    return Offer(name, nodes, run, plan, under_failures(plan, nodes=nodes), question.price(name))


def _start(planned: PlannedRun, nodes: int) -> tuple[ResolvedRun, Plan] | None:
    """The config's own layout where it fits, else the fastest of those that need least memory; and its plan."""
    costs, machine = planned.costs, planned.machine
    try:
        run = in_layout(planned.run, {}, world_size=nodes * machine.devices_per_node)
        if not run.spare and not run.batch.padding_rows and (plan := make_plan(run, costs, machine)).memory.fits:
            return run, plan
    except ConfigError:
        pass
    found = fastest_that_fits(planned, nodes)
    return None if found is None else (found.run, make_plan(found.run, costs, machine))


def lines(
    planned: PlannedRun, offers: Sequence[Offer], without: Mapping[str, str], question: Question
) -> Iterator[str]:
    """The table for a terminal."""
    money = any(each.price is not None for each in offers)
    head = [*_HEAD, *(["money"] if money else []), "layout"]
    rows = [head, *([*_row(each), *([_money(each)] if money else []), each.run.layout] for each in offers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield from (f"{name}: {why}" for name, why in without.items())
    yield ""
    yield f"{planned.run.steps:,} steps of {planned.run.batch.tokens:,} tokens on each"
    if offers:
        yield "time, GPU-hours and money include failures; intervals are those of the step"
        yield f"layouts: the config's with up to {_CHANGES} changes, or the fastest that fits; --search looks at all"
    yield f"memory: {question.margin:.0%} of a device stays free (--memory-margin)"
    yield "failures: 419 in 54 days on 2,048 nodes (Llama 3) on every machine; headrace goodput takes other rates"
    yield from (f"note: {note}" for note in planned.notes)


def as_json(offers: Sequence[Offer], without: Mapping[str, str]) -> dict[str, Any]:
    """The table as one JSON object."""
    return {
        "machines": [
            {
                "machine": each.machine,
                "nodes": each.nodes,
                "gpus": each.run.topology.world_size,
                "layout": each.run.layout,
                "peak": each.plan.memory.peak.plain(),
                "step_s": each.plan.step_s.plain(),
                "tokens_per_s": each.plan.tokens_per_s.plain(),
                "goodput": each.failures.goodput,
                "days": each.failures.days.plain(),
                "gpu_hours": each.failures.gpu_hours.plain(),
                "money": None if each.price is None else money_of(each.failures.gpu_hours, each.price).plain(),
            }
            for each in offers
        ],
        "without": dict(without),
    }


def _line(each: Offer) -> str:
    return f"{each.nodes} x {each.run.topology.world_size // each.nodes}, {each.failures.days.shown(days_text)}"


def _row(each: Offer) -> list[str]:
    return [
        each.machine,
        f"{each.nodes} x {each.run.topology.world_size // each.nodes}",
        shown_bytes(each.plan.memory.peak.typical),
        each.plan.step_s.shown(lambda seconds: f"{seconds:.3g} s"),
        f"{each.plan.tokens_per_s.typical:,.0f}",
        f"{each.failures.days.shown(days_text)}, {each.failures.goodput:.1%}",
        hours_text(each.failures.gpu_hours),
    ]


def _money(each: Offer) -> str:
    if each.price is None:
        return ""
    return money_of(each.failures.gpu_hours, each.price).shown(lambda money: f"{money:,.0f}")
