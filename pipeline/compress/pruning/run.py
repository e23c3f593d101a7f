"""Runs a pruning: gathers importance, cuts, writes, evaluates before and after, commits the directory.

With several processes, all gather importance (`gathering`); then only rank 0 continues.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from foundation.directory import Details, Manifest, Parents, parent_entry, staged
from foundation.remote_output import published, upload_left
from pipeline.compress.pruning.cutting import write_folder
from pipeline.compress.pruning.gathering import Importance, find_importance
from pipeline.compress.pruning.rules import PruningPlan
from pipeline.compress.pruning.selection import select, unseen_experts
from pipeline.compress.pruning.stored_sums import remove_sums
from pipeline.evaluation.consumers.gate import GateSample, run_pruned_gate
from pipeline.evaluation.consumers.original import scored_original
from pipeline.evaluation.consumers.table import consumer_table
from pipeline.evaluation.heldout.before_after import add_measured, changes, measured, scored_data, table_of
from pipeline.evaluation.heldout.measure import measure
from pipeline.models.card.card import commit_with_card
from pipeline.models.card.facts import recorded_facts
from pipeline.models.card.lineage import KEY as LINEAGE
from pipeline.models.card.lineage import lineage_of, with_step
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.tokenizer_files import copy_tokenizer
from pipeline.runtime.launch.environment import Launch


def prune(plan: PruningPlan, launch: Launch) -> Manifest | None:
    """Writes the pruned model and prints its metrics before and after.

    Args:
        plan: result of `prepare`.
        launch: how this process was started.

    Returns:
        The manifest; None on all ranks but 0.

    Raises:
        ConfigError: the latency cannot be met, or the architecture does not support the layout.
        DataError: the original or the result cannot be loaded in a subprocess, its perplexity is not finite, or a
            consumer does not read the result as transformers does.
    """
    found = find_importance(plan, launch)
    if launch.rank > 0:
        return None
    config, parents = found.plan.config, _parents(found.plan)
    manifest = upload_left(config.output, config=config.model_dump(), parents=parents)
    if manifest is None:
        with published(config.output):
            manifest = _cut(found, parents)
    remove_sums(found.plan)
    return manifest


def _parents(plan: PruningPlan) -> Parents:
    return {
        "model": parent_entry(plan.source.origin, plan.source.fingerprint()),
        "data": parent_entry(plan.dataset.origin, plan.dataset.manifest.fingerprint),
    }


def _cut(found: Importance, parents: Parents) -> Manifest:
    console = Console(stderr=True)
    plan, sums = found.plan, found.sums
    assert plan.shape is not None
    how = plan.config.importance
    kept = select(sums, plan.anatomy, plan.shape, metric=how.metric, depth=how.depth)
    if unseen := unseen_experts(sums, kept):
        console.print(unseen_line(unseen), markup=False)
    source = plan.source
    sample = GateSample.of(plan.dataset, source.path, vocabulary=source.vocab_size, longest=source.longest_sequence)
    scored = scored_original(
        plan.source.path, plan.config.data, sample, vocabulary=plan.source.vocab_size, console=console
    )
    with scored as original, staged(plan.output) as staging:
        write_folder(plan, plan.shape, kept, sums, staging)
        copy_tokenizer(plan.source.path, staging)
        console.print("evaluating the result in a subprocess")
        after = measure(staging, plan.config.data)
        recorded = details(plan, plan.shape, staging, before=original.measured, after=after)
        recorded["pruning"] |= {"kept": kept.summary(), "latency": found.latency, "experts_without_tokens": len(unseen)}
        recorded["consumers"] = run_pruned_gate(
            plan.source.path,
            staging,
            scheme=plan.dtype,
            sample=sample,
            vocabulary=plan.source.vocab_size,
            consumers=plan.consumers,
            say=lambda line: console.print(line, markup=False),
            reference=original.scores,
        )
        recorded |= {"model_type": plan.source.config.get("model_type"), "dtype": plan.dtype}
        recorded[LINEAGE] = with_step(lineage_of(plan.source.path), "pruning", step_numbers(recorded))
        recorded |= recorded_facts(plan.source.path)
        config = plan.config.model_dump()
        manifest = commit_with_card(staging, plan.output, config=config, parents=parents, details=recorded)
    Console(file=sys.stdout).print(table(manifest))
    Console(file=sys.stdout).print(consumer_table(recorded["consumers"], title="beside the original; no bound"))
    return manifest


def details(plan: PruningPlan, shape: Mapping[str, int], folder: Path, *, before: Details, after: Details) -> Details:
    """Details for the manifest: sizes, parameters, and held-out metrics before and after.

    Args:
        plan: plan of the pruning.
        shape: axis -> size of the result.
        folder: folder of the result.
        before: metrics of the original, by `measure`.
        after: metrics of the result, by `measure`.
    """
    result = ModelFolder.open(folder)
    pruning = {
        "shape": {axis: [size, shape[axis]] for axis, size in plan.anatomy.sizes.items()},
        "metric": plan.config.importance.metric,
        "depth": plan.config.importance.depth,
        "calibration_tokens": plan.config.calibration.samples * plan.config.data.sequence_length,
    }
    return {
        "parameters": result.parameters,
        "weight_bytes": result.weight_bytes,
        "pruning": {**pruning, "parameters_before": plan.source.parameters},
        "before": measured(before),
        "after": measured(after),
        "data": scored_data(before),
    }


def step_numbers(recorded: Details) -> Details:
    """A pruning's numbers for the lineage: sizes before and after, importance, bytes and loss before and after."""
    pruning = recorded["pruning"]
    found: Details = {
        "parameters_before": pruning["parameters_before"],
        "parameters_after": recorded["parameters"],
    }
    found |= {axis: f"{old:,} -> {new:,}" for axis, (old, new) in pruning["shape"].items() if old != new}
    found |= {key: pruning[key] for key in ("metric", "depth", "calibration_tokens")}
    found |= changes(recorded)
    return {key: value for key, value in found.items() if value is not None}


def unseen_line(unseen: Sequence[tuple[int, int]], *, shown: int = 8) -> str:
    """A warning about each (layer, expert) that got no calibration token and yet loses channels."""
    places = ", ".join(f"expert {expert} of layer {layer}" for layer, expert in unseen[:shown])
    more = f" and {len(unseen) - shown} more" if len(unseen) > shown else ""
    why = f"warning: {places}{more} got no token of the calibration: which of their channels go is arbitrary"
    return f"{why}\n  try: a larger calibration.samples, or a smaller num_experts"


def table(manifest: Manifest) -> Table:
    """A table with the columns before and after, from the manifest alone."""
    recorded = manifest.details
    pruning = recorded["pruning"]
    shown = table_of(manifest, after=recorded["after"]["dtype"])
    share = recorded["parameters"] / pruning["parameters_before"]
    shown.add_row("parameters", f"{pruning['parameters_before']:,}", f"{recorded['parameters']:,} ({share:.1%})")
    for axis, (old, new) in pruning["shape"].items():
        shown.add_row(axis, f"{old:,}", f"{new:,}")
    add_measured(shown, recorded)
    return shown
