"""Warnings where a run has too little room: a derived micro-batch on the device, checkpoints on the disk."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import suppress

import torch

from foundation.directory import existing_parent
from pipeline.checkpoint.format.naming import finished_checkpoints
from pipeline.engines.common import matrices_of
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.memory import largest_micro_batch
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.run.out_of_memory import memory_of, own_peak
from pipeline.run.prepare import PreparedRun

_EMA_BYTES = 4
"""Bytes per parameter of the moving average of the weights."""
_BESIDES = 2**20
"""Bytes for the journal, the tokenizer, and what shards have besides tensors: 0.1 MB each of the smallest model."""


def room_warnings(prepared: PreparedRun) -> Iterator[str]:
    """Yields a line with a remedy for a derived micro-batch, and for checkpoints, that will not fit on this machine."""
    yield from _micro_batch(prepared)
    yield from _disk(prepared)


def _micro_batch(prepared: PreparedRun) -> Iterator[str]:
    run = prepared.run
    if run.config.train_micro_batch_size_per_gpu is not None:
        return
    with_gpu = torch.cuda.is_available() and run.config.launch.device == "auto"
    memory, peak = memory_of(torch.device("cuda" if with_gpu else "cpu")), own_peak(run, prepared.model)
    footprint = footprint_of(run, prepared.model)
    if footprint is None or peak is None or peak <= memory:
        return
    ranks = range(run.topology.pp)
    largest = min(largest_micro_batch(run, footprint, memory=memory, pp_rank=rank) for rank in ranks)
    remedy = f"train_micro_batch_size_per_gpu {largest} is the largest that fits; the rest is gradient accumulation"
    if not largest:
        remedy = "not even 1 fits: memory.activation_checkpointing full, or more ranks"
    yield (
        f"the micro-batch {run.batch.micro:,}, which follows from the other batch sizes, needs {shown_bytes(peak)} per"
        f" rank, and {'a GPU' if with_gpu else 'a process on this host'} has {shown_bytes(memory)}: {remedy}"
    )


def _disk(prepared: PreparedRun) -> Iterator[str]:
    run, section = prepared.run, prepared.run.config.run
    place = existing_parent(section.local_dir)
    with suppress(OSError):
        each = _checkpoint_bytes(prepared)
        free = max(0, shutil.disk_usage(place).free - _BESIDES)
        kept = min(section.keep_checkpoints, run.steps)
        lasting = 0 if section.keep_every is None else run.steps // section.keep_every
        others = 1 + lasting - len(finished_checkpoints(section.local_dir))  # an old one goes when the new one is whole
        if (needed := each * max(1, kept + others)) > free:
            fewer, elsewhere = int(free // each) - others, f"set run.dir to a disk with {shown_bytes(needed)}"
            yield (
                f"checkpoints need {shown_bytes(needed)} more in run.dir ({shown_bytes(each)} each:"
                f" run.keep_checkpoints {section.keep_checkpoints}, one while it is written"
                + (f", {lasting} by run.keep_every" if lasting else "")
                + f"), and its disk has {shown_bytes(free)} free: "
                + (f"--set run.keep_checkpoints={fewer}, or {elsewhere}" if 1 <= fewer < kept else elsewhere)
            )


def _checkpoint_bytes(prepared: PreparedRun) -> float:
    """Computes the bytes of a checkpoint: fp32 weights, optimizer states, and the moving average if there is one."""
    run, parameters = prepared.run, prepared.size.parameters
    matrices = sum(math.prod(form.shape) for form in matrices_of(prepared.model, run.config.optimizer).values())
    states = run.config.state_kind.state_bytes(parameters=parameters, matrices=matrices)
    return states + (0 if run.config.run.ema is None else _EMA_BYTES * parameters)
