"""Runs a pruning: gathers importance, cuts, writes, evaluates before and after, commits the directory.

Under a launcher with several processes all of them gather, each on its own windows; then rank 0 alone goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from headrace.base.directory import Manifest, parent_entry, staged
from pipeline.consumers.gate import Sample
from pipeline.consumers.pruned_gate import run_pruned_gate
from pipeline.consumers.table import consumer_table
from pipeline.data.dataset import choose_windows
from pipeline.data.loader import MicroBatch, make_batch
from pipeline.evaluation.loading import load_model
from pipeline.evaluation.measure import measure
from pipeline.launch.environment import Launch
from pipeline.launch.group import process_group
from pipeline.model_card.card import commit_with_card
from pipeline.model_card.lineage import KEY as LINEAGE
from pipeline.model_card.lineage import lineage_of, with_step
from pipeline.models.tokenizer_files import copy_tokenizer
from pipeline.pruning.cutting import write_folder
from pipeline.pruning.importance import Sums, add_up, gather
from pipeline.pruning.latency import shape_for_latency
from pipeline.pruning.masks import mask_weights
from pipeline.pruning.report import details, step_numbers, table
from pipeline.pruning.rules import PruningPlan
from pipeline.pruning.selection import select
from pipeline.pruning.sharded import ShardedModel
from pipeline.pruning.stored_sums import fingerprint, load_sums, needs_loss, remove_sums, save_sums


def prune(plan: PruningPlan, launch: Launch) -> Manifest | None:
    """Writes the pruned model and prints its metrics before and after.

    Args:
        plan: by `prepare`.
        launch: how this process was started.

    Returns:
        The manifest; None on all ranks but 0.

    Raises:
        ConfigError: a latency that cannot be met.
        DataError: the original or the result cannot be loaded in a subprocess, its perplexity is not finite, or a
            consumer does not read the result as transformers does.
    """
    console = Console(stderr=True)
    latency = None
    if plan.shape is None and launch.rank == 0:
        console.print("measuring forward passes for the target latency")
        shape, latency = shape_for_latency(plan)
        plan = replace(plan, shape=shape)
    sums = importance(plan, launch)
    if launch.rank > 0:
        return None
    assert plan.shape is not None
    how = plan.config.importance
    kept = select(sums, plan.anatomy, plan.shape, metric=how.metric, depth=how.depth)
    sample = Sample.of(plan.dataset, plan.source.path, vocabulary=plan.source.vocab_size)
    console.print(f"{plan.source.path}: evaluating the original")
    before = measure(plan.source.path, plan.config.data)
    with staged(plan.output) as staging:
        write_folder(plan, plan.shape, kept, sums, staging, change=mask_weights(plan, kept, sums))
        copy_tokenizer(plan.source.path, staging)
        console.print("evaluating the result in a subprocess")
        after = measure(staging, plan.config.data)
        recorded = details(plan, plan.shape, staging, before=before, after=after)
        recorded["pruning"] |= {"kept": kept.summary(), "latency": latency}
        recorded["consumers"] = run_pruned_gate(
            plan.source.path,
            staging,
            scheme=plan.dtype,
            sample=sample,
            vocabulary=plan.source.vocab_size,
            consumers=plan.consumers,
            say=lambda line: console.print(line, markup=False),
        )
        parents = {"model": parent_entry(plan.source.path, plan.source.fingerprint())}
        parents["data"] = parent_entry(plan.dataset.path, plan.dataset.manifest.fingerprint)
        recorded |= {"model_type": plan.source.config.get("model_type"), "dtype": plan.dtype}
        recorded[LINEAGE] = with_step(lineage_of(plan.source.path), "pruning", step_numbers(recorded))
        config = plan.config.model_dump()
        manifest = commit_with_card(staging, plan.output, config=config, parents=parents, details=recorded)
    remove_sums(plan)
    Console(file=sys.stdout).print(table(manifest))
    Console(file=sys.stdout).print(consumer_table(recorded["consumers"], title="beside the original; no bound"))
    return manifest


def importance(plan: PruningPlan, launch: Launch) -> Sums:
    """The sums of all processes: those of an earlier start, or gathered now and kept for the next. Collective."""
    mark = fingerprint(plan)
    if launch.world_size == 1:
        found = load_sums(plan, mark) or _gather(plan, launch)
    else:
        with process_group(launch, gpu=_device(launch).index):  # the sums go over gloo, a sharded model over nccl
            found = _gather_together(plan, launch, mark)
    if launch.rank == 0:
        save_sums(plan, found, mark)
    return found


def _gather_together(plan: PruningPlan, launch: Launch, mark: str) -> Sums:
    """Rank 0 decides for all whether there is something to gather: it may be the only one that sees the directory."""
    stored = load_sums(plan, mark) if launch.rank == 0 else None
    there = torch.tensor([stored is not None])
    torch.distributed.broadcast(there, 0)
    return (stored or {}) if there.item() else add_up(_gather(plan, launch))


def _gather(plan: PruningPlan, launch: Launch) -> Sums:
    device, tp = _device(launch), plan.config.importance.tp
    sharded = ShardedModel(plan.source.path, launch, tp=tp, device=device) if tp > 1 else None
    model = sharded.causal if sharded else load_model(plan.source.path, dtype=torch.float32, device=device)
    batches = list(_windows(plan, launch))
    console = Console(stderr=True)
    hidden = launch.rank > 0 or not console.is_terminal
    shown = track((_batch(plan, each) for each in batches), "importance", len(batches), console=console, disable=hidden)
    return gather(model, shown, device=device, forward=sharded, depth_loss=needs_loss(plan), tp=tp)


def _device(launch: Launch) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", launch.local_rank % torch.cuda.device_count())


def _windows(plan: PruningPlan, launch: Launch) -> Iterator[list[int]]:
    """This process's windows, in batches."""
    chosen = choose_windows(plan.calibration.windows, plan.config.calibration.samples).tolist()
    tp = plan.config.importance.tp
    own = chosen[launch.rank // tp :: launch.world_size // tp]
    size = plan.config.data.batch_size
    yield from (own[begin : begin + size] for begin in range(0, len(own), size))


def _batch(plan: PruningPlan, windows: list[int]) -> MicroBatch:
    boundaries = plan.calibration.boundaries(np.asarray(windows)) if plan.config.data.mask_documents else None
    return make_batch(plan.calibration.read(windows), boundaries)
