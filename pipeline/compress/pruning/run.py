"""Runs a pruning: gathers importance, cuts, writes, evaluates before and after, commits the directory.

With several processes all of them gather (`gathering`); then only rank 0 continues.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from headrace.base.directory import Manifest, parent_entry, staged
from headrace.base.remote_output import published, upload_left
from pipeline.compress.pruning.cutting import write_folder
from pipeline.compress.pruning.gathering import Importance, find_importance
from pipeline.compress.pruning.report import details, step_numbers, table, unseen_line
from pipeline.compress.pruning.rules import PruningPlan
from pipeline.compress.pruning.selection import select, unseen_experts
from pipeline.compress.pruning.stored_sums import remove_sums
from pipeline.evaluation.consumers.gate import GateSample, run_pruned_gate
from pipeline.evaluation.consumers.original import scored_original
from pipeline.evaluation.consumers.table import consumer_table
from pipeline.evaluation.heldout.measure import measure
from pipeline.models.card.card import commit_with_card
from pipeline.models.card.facts import recorded_facts
from pipeline.models.card.lineage import KEY as LINEAGE
from pipeline.models.card.lineage import lineage_of, with_step
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


def _parents(plan: PruningPlan) -> dict[str, Any]:
    return {
        "model": parent_entry(plan.source.origin, plan.source.fingerprint()),
        "data": parent_entry(plan.dataset.origin, plan.dataset.manifest.fingerprint),
    }


def _cut(found: Importance, parents: dict[str, Any]) -> Manifest:
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
