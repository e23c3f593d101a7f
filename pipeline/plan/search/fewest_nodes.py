"""Finds the fewest nodes that hold a model, for a run that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from foundation.configfile import ConfigTree
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.plan.predict.model_costs import ModelCosts
from pipeline.plan.predict.planned_run import PlannedRun
from pipeline.plan.search.layouts import layouts
from pipeline.plan.search.search import Candidate, allowed, evaluate
from pipeline.runtime.machines.machine import Machine

MOST_NODES = 4096


def fewest_nodes(planned: PlannedRun) -> tuple[int, ConfigTree] | None:
    """The fewest nodes on which a layout fits, and the settings of the fastest layout that fits.

    Powers of two are tried, then the numbers of nodes between the last two over which the batch divides.

    Returns:
        None where even 4,096 nodes are too few: a rank of the smallest layout is too large.
    """
    nodes = 1
    while nodes <= MOST_NODES:
        if found := fastest_that_fits(planned, nodes):
            between = (each for each in range(nodes // 2 + 1, nodes) if nodes <= _TRIED)
            better = next(((each, best) for each in between if (best := fastest_that_fits(planned, each))), None)
            count, best = better or (nodes, found)
            return count, dict(best.sets)
        nodes *= 2
    return None


_TRIED = 16
"""Number of nodes up to which every number is tried, not only powers of two."""


def undivided(planned: PlannedRun, ranks: int) -> str:
    """Says that the batch does not divide over the ranks."""
    return f"the batch of {planned.run.batch.samples:,} samples does not divide over {ranks} ranks"


def fastest_that_fits(planned: PlannedRun, nodes: int) -> Candidate | None:
    """The fastest layout on `nodes` nodes, among the settings that need least memory; None where none fits."""
    run, machine, costs = planned.run, planned.machine, planned.costs
    world = nodes * machine.devices_per_node
    topology = replace(run.topology, pp=1, cp=1, tp=1, ep=1, dp=world)
    wider = replace(run, topology=topology)
    fitting = sorted(_fitting(wider, costs, machine), key=lambda each: each.step_s)
    best = allowed(fitting, costs, count=1)
    return best[0] if best else None


def _fitting(run: ResolvedRun, costs: ModelCosts, machine: Machine) -> Iterator[Candidate]:
    """Layouts that fit, with the settings that need least memory: smallest micro-batch, all activations recomputed."""
    for sets in layouts(run, machine, experts=costs.widths.all_experts):
        if sets["memory.activation_checkpointing"] == "full" and sets["train_micro_batch_size_per_gpu"] == 1:
            candidate = evaluate(run, costs, machine, sets)
            if candidate is not None and candidate.fits:
                yield candidate
