"""Writing and reading named shards: fp32 weights and moments under Hugging Face names, on any layout.

Keys are `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, the scalar `optimizer_step` and, of an fp16 run,
`loss_scale`.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from headrace.base.errors import CheckpointError
from headrace.base.interrupts import defer_interrupt
from pipeline.checkpoint.plan import State, make_write_plan
from pipeline.checkpoint.shards import LoadPlanner
from pipeline.checkpoint.store import on_rank_zero, raise_together
from pipeline.checkpoint.write import write_metadata, write_pieces

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
    failed: str | None = None
    results: list[Any] = []
    try:
        results = write_pieces(plan, plan.source(state), directory).results
    except (OSError, RuntimeError) as error:
        failed = str(error) or repr(error)
    raise_together(failed, f"{directory} could not be written")
    everyone = [results]
    if dist.is_initialized():
        everyone = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, results)
    on_rank_zero(lambda: write_metadata(plan, directory, everyone))


def read(state: State, directory: Path) -> None:
    """Fills the shards in place from a directory written in any layout. Collective.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or a file is damaged.
    """
    try:
        reader = dcp.FileSystemReader(directory)
        with _quiet(), defer_interrupt("reading the checkpoint"):
            dcp.load(dict(state), storage_reader=reader, planner=LoadPlanner(), no_dist=not dist.is_initialized())
    except (CheckpointException, RuntimeError, ValueError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{directory} cannot be read into this model: {_first_cause(error)}\n"
            f"  try: the config the checkpoint was made with, or an older checkpoint"
        ) from None


def stored_shapes(directory: Path) -> dict[str, torch.Size]:
    """Parameter name -> full shape of the weights in a checkpoint, from its metadata alone."""
    try:
        metadata = dcp.FileSystemReader(directory).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{directory} has no readable metadata: {error}") from None
    prefix = weight_key("")
    entries: Iterable[tuple[str, Any]] = metadata.state_dict_metadata.items()
    return {key.removeprefix(prefix): entry.size for key, entry in entries if key.startswith(prefix)}


def read_weight(name: str, shape: torch.Size, directory: Path) -> Tensor:
    """One parameter's full fp32 value, without a process group."""
    whole = torch.empty(shape, dtype=torch.float32)
    read({weight_key(name): whole}, directory)
    return whole


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        failure = next(iter(error.failures.values()))
        error = failure[0] if isinstance(failure, tuple) else failure
    return (str(error) or repr(error)).splitlines()[0]
