"""Reads and writes the sharded training state: fp32 weights and optimizer states by Hugging Face name, in any layout.

Keys are `weight/NAME`; one key per state tensor of the optimizer (AdamW `exp_avg/NAME` and `exp_avg_sq/NAME`, Lion
`exp_avg/NAME`, SGD with momentum and hidden matrices of Muon `momentum_buffer/NAME`); `buffer/NAME` for a persistent
buffer, in its own dtype; and up to three more: the scalar `optimizer_step` if the optimizer counts its steps,
`loss_scale` in an fp16 run, and `expert_load` in a run with an auxiliary loss of its experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from foundation.errors import CheckpointError
from foundation.interrupts import defer_interrupt
from pipeline.checkpoint.format.metadata import read_metadata
from pipeline.checkpoint.format.shard_table import CheckpointMetadata, State, parts_of
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.memory.shard_files import ShardFiles
from pipeline.checkpoint.read_shards import ShardReader
from pipeline.checkpoint.write.locations import MetadataWriter
from pipeline.checkpoint.write.plan import WritePlan, make_write_plan
from pipeline.checkpoint.write.write_shards import WrittenShards, write_metadata, write_shards
from pipeline.config.sections.optimizers import EMA, OptimizerKind
from pipeline.models.construction.buffers import persistent_buffers
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero, raise_on_all_ranks

OPTIMIZER_STEP = "optimizer_step"
LOSS_SCALE = "loss_scale"
"""Key of the result of `engines.loss_scale.LossScaler.to_tensor`: fp64 [3]."""
EXPERT_LOAD = "expert_load"
"""Key of the fraction of tokens routed to every expert in the last step: fp32 [layers with experts, experts]."""

OUTER_STATES = ("outer_weight", "outer_momentum", "outer_error")
"""Prefixes of the keys of an island's outer state (low-communication training): `outer_weight/NAME` and so on."""


def weight_key(name: str) -> str:
    """Returns the key of a parameter's fp32 value."""
    return f"weight/{name}"


def moment_key(moment: str, name: str) -> str:
    """Returns the key of one of a parameter's optimizer states."""
    return f"{moment}/{name}"


def parameter_keys(name: str, kind: OptimizerKind) -> list[str]:
    """Returns the keys of a parameter's value and of its optimizer states, in the order of `kind.states`."""
    return [weight_key(name), *(moment_key(state, name) for state in kind.states)]


def buffer_key(name: str) -> str:
    """Returns the key of a persistent buffer."""
    return f"buffer/{name}"


def buffer_state(model: nn.Module) -> dict[str, NamedShard | Tensor]:
    """The persistent buffers of this rank's part of a model, under their keys: views, which `read` fills in place.

    Every rank that has a buffer has the whole buffer; one replica is written (`write.plan`).
    """
    return {buffer_key(name): buffer.detach() for name, buffer in persistent_buffers(model).items()}


def write(state: State, directory: Path) -> None:
    """Writes every rank's shards and the metadata into a directory. Collective.

    Raises:
        CheckpointError: a rank could not write.
    """
    plan = make_write_plan(state)
    failure, written = None, cast("WrittenShards | None", None)
    try:
        written = write_shards(plan, plan.value_lookup(state), directory)
    except (OSError, RuntimeError) as error:
        failure = str(error) or repr(error)
    raise_on_all_ranks(failure, f"{directory} could not be written")
    assert written is not None
    locations: list[Any] = [written.locations]
    if dist.is_initialized():
        locations *= dist.get_world_size()
        dist.gather_object(written.locations, locations if plan.rank == 0 else None)
    on_rank_zero(lambda: _write_metadata(plan, locations, directory))


def _write_metadata(plan: WritePlan, locations: list[Any], directory: Path) -> None:
    assert plan.division is not None
    metadata = MetadataWriter(plan.division)
    metadata.update(dict(enumerate(locations)))
    write_metadata(metadata.encoded(), directory)


def read(state: State, directory: Path, *, fresh_optimizer: bool = False, files: ShardFiles | None = None) -> None:
    """Fills the shards in place from a directory written in any layout (reshard on load). Collective.

    Persistent buffers and the experts' load stay unchanged if the directory lacks them; an EMA begins with the weights.

    Args:
        state: the shards.
        directory: directory of the checkpoint.
        fresh_optimizer: whether to set the optimizer's states and step counter to zero instead of reading them.
        files: sources of the checkpoint's files; the directory when None.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or a file is damaged.
    """
    failure: str | None = None
    with defer_interrupt("reading the checkpoint"):
        try:
            metadata = read_metadata(directory)
            wanted = {key: value for key, value in state.items() if not (fresh_optimizer and _of_optimizer(key))}
            found = _without_absent(wanted, metadata)
            ShardReader(directory, metadata, files).read(found)
            for weight, average in ((weight, own) for key, weight, own in averaged_parts(state) if key not in found):
                average.copy_(weight)
        except (CheckpointError, RuntimeError, OSError) as error:
            failure = (str(error) or repr(error)).splitlines()[0]
        failures: list[str | None] = [failure]
        if dist.is_initialized():
            failures *= dist.get_world_size()
            dist.all_gather_object(failures, failure)
    first = next((each for each in failures if each is not None), None)
    if first is not None:
        raise CheckpointError(
            f"{directory} cannot be read into this model: {first}\n"
            f"  try: the config the checkpoint was made with, or an older checkpoint"
        )
    for value in (value for key, value in state.items() if fresh_optimizer and _of_optimizer(key)):
        value.zero_()


def _of_optimizer(key: str) -> bool:
    apart = (weight_key(""), buffer_key(""), moment_key(EMA, ""))
    return key not in (LOSS_SCALE, EXPERT_LOAD) and not key.startswith(apart)


def averaged_parts(state: State) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields (key of the average, shard of a weight, the same shard of its EMA) for all shards of a state."""
    prefix = moment_key(EMA, "")
    for key in (key for key in state if key.startswith(prefix)):
        weights, averages = (parts_of(state[each]).values() for each in (weight_key(key.removeprefix(prefix)), key))
        yield from ((key, weight, average) for weight, average in zip(weights, averages, strict=True))


def _without_absent(state: State, metadata: CheckpointMetadata) -> State:
    """Drops what a checkpoint lacks: buffers, EMA, the experts' load; `run.ema` and `moe` may be switched on later."""
    optional = {k for k in state if k == EXPERT_LOAD or k.startswith((buffer_key(""), moment_key(EMA, "")))}
    found = metadata.table.index
    return {key: value for key, value in state.items() if key in found or key not in optional}
