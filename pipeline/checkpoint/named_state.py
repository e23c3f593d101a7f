"""Reads and writes the sharded training state: fp32 weights and moments under Hugging Face names, for any layout.

Keys are `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, the scalar `optimizer_step` and, of an fp16 run,
`loss_scale`.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from headrace.base.errors import CheckpointError
from headrace.base.interrupts import defer_interrupt
from pipeline.checkpoint.plan import State, make_write_plan
from pipeline.checkpoint.shards import LoadPlanner
from pipeline.checkpoint.store import on_rank_zero, raise_on_all_ranks
from pipeline.checkpoint.write import write_metadata, write_shards

OPTIMIZER_STEP = "optimizer_step"
LOSS_SCALE = "loss_scale"
"""Key of what `engines.loss_scale.LossScaler.to_tensor` returns: fp64 [3]."""


def weight_key(name: str) -> str:
    """Key of a parameter's fp32 value."""
    return f"weight/{name}"


def moment_key(moment: str, name: str) -> str:
    """Key of one of a parameter's optimizer moments."""
    return f"{moment}/{name}"


def write(state: State, directory: Path) -> None:
    """Writes every rank's shards into a directory, with torch.distributed.checkpoint's metadata. Collective.

    Raises:
        CheckpointError: a rank could not write.
    """
    plan = make_write_plan(state)
    failure: str | None = None
    results: list[Any] = []
    try:
        results = write_shards(plan, plan.value_lookup(state), directory).results
    except (OSError, RuntimeError) as error:
        failure = str(error) or repr(error)
    raise_on_all_ranks(failure, f"{directory} could not be written")
    all_results = [results]
    if dist.is_initialized():
        all_results = [[]] * dist.get_world_size()
        dist.all_gather_object(all_results, results)
    on_rank_zero(lambda: write_metadata(plan, directory, all_results))


def read(state: State, directory: Path) -> None:
    """Fills the shards in place from a directory written in any layout (reshard on load). Collective.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or a file is damaged.
    """
    try:
        reader = dcp.FileSystemReader(directory)
        with _no_single_process_warning(), defer_interrupt("reading the checkpoint"):
            dcp.load(dict(state), storage_reader=reader, planner=LoadPlanner(), no_dist=not dist.is_initialized())
    except (CheckpointException, RuntimeError, ValueError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{directory} cannot be read into this model: {_first_cause(error)}\n"
            f"  try: the config the checkpoint was made with, or an older checkpoint"
        ) from None


@contextmanager
def _no_single_process_warning() -> Iterator[None]:
    """Suppresses torch's warning that torch.distributed is not used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        failure = next(iter(error.failures.values()))
        error = failure[0] if isinstance(failure, tuple) else failure
    return (str(error) or repr(error)).splitlines()[0]
