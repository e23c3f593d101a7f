"""Check of a node: a run's own pre-flight for the given config, and the space that its checkpoints need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.directory import free_bytes
from foundation.remote_run import up_to_date
from headrace.doctor.check import Context, Finding
from pipeline.config.load import load_config
from pipeline.config.past_stages import continued
from pipeline.config.rules.resolve import resolve

if TYPE_CHECKING:
    from pipeline.run.prepare import PreparedRun

_FULL = "the run stops at a save, hours after its start"
_CHECKPOINTS = 2
"""Checkpoints that fit at least: the newest stays until the next one is complete."""


def run(context: Context) -> Iterator[Finding]:
    """Makes the pre-flight; its errors are raised, and are findings of this check."""
    if context.config is None:
        yield Finding(None, "needs a config: --config FILE")
        return
    from pipeline.run.connect import check_and_prepare  # noqa: PLC0415  imports torch
    from pipeline.runtime.launch.arguments import has_begun  # noqa: PLC0415
    from pipeline.runtime.launch.environment import SINGLE_PROCESS  # noqa: PLC0415

    config = load_config(context.config, context.overrides)
    run_dir = up_to_date(config.run.dir)
    config, begun = continued(config, run_dir), has_begun(run_dir, config=config)
    run = resolve(config, world_size=context.processes * len(context.nodes), begun=begun)
    prepared, device, notes = check_and_prepare(run, SINGLE_PROCESS)
    yield Finding(True, f"{run.layout}; {run.precision}; on {device.type}{''.join(f'; {note}' for note in notes)}")
    yield from _space(prepared, context.processes)


def _space(prepared: PreparedRun, ranks: int) -> Iterator[Finding]:
    """Compares the free space of the run's directory, and of its copies in memory, with what they will hold."""
    from pipeline.engines.sizes.footprint import footprint_of  # noqa: PLC0415
    from pipeline.plan.predict.host_plan import checkpoint_bytes  # noqa: PLC0415

    run, footprint = prepared.run, footprint_of(prepared.run, prepared.model)
    if footprint is None:
        yield Finding(None, "the size of a checkpoint is unknown for this architecture")
        return
    share = max(checkpoint_bytes(run, rank) for rank in footprint.ranks)
    places = {"run.dir": (run.config.run.local_dir, share * run.topology.world_size)}
    if (directory := run.config.run.in_memory_checkpoints) is not None:
        places["run.in_memory_checkpoints"] = (Path(directory), share * ranks)
    for key, (path, size) in places.items():
        free, needed = free_bytes(path) / 1e9, _CHECKPOINTS * size / 1e9
        text = f"{key} = {path} has {free:.4g} GB of free space, and {_CHECKPOINTS} checkpoints take {needed:.4g} GB"
        remedy = f"free space there, or --set {key}=DIR on a larger file system"
        yield Finding(True, text) if free >= needed else Finding(False, text, _FULL, remedy)
