"""Lines that a run prints about itself: when it starts, resumes, changes and stops."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.data.mixing_weights import Extent
from pipeline.data.skips import Skips
from pipeline.engines.base import Engine
from pipeline.engines.parallel.partition import stage_lines
from pipeline.run.anomalies.guarded_step import Rollback
from pipeline.run.before.advice import advice
from pipeline.run.before.task_cost import task_lines
from pipeline.run.prepare import PreparedRun
from pipeline.run.rank_of_run import RankOfRun
from pipeline.run.same_run import changes_since, describe_changes, learning_rate_change
from pipeline.run.uneven.measure_stages import MeasuredStages
from pipeline.runtime.faults.stop_signals import Stop
from pipeline.runtime.launch import Launch


def opening_lines(
    prepared: PreparedRun, engine: Engine, launch: Launch, checkpoint: Checkpoint | None
) -> Iterator[str]:
    """Yields devices, layout, model, batch sizes, pipeline stages, length in steps, tokens and epochs, resume step."""
    run, size = prepared.run, prepared.size
    epochs = max(prepared.mixture.order.epochs(Extent.of(run).samples))
    yield f"{launch} on {engine.device_name}; {run.layout}"
    yield f"{size.parameters:,} parameters, {run.precision}; {run.batch}"
    if run.held_bytes_per_parameter is not None:
        states = run.config.optimizer.params.moments_dtype or "fp32"
        of = "parameter" if run.config.optimizer.kind.rest is None else "element of a hidden matrix"
        yield f"{run.held_bytes_per_parameter:.4g} bytes per {of}, gradient and {states} optimizer states included"
    yield from stage_lines(run, prepared.model)
    yield (
        f"{run.steps:,} steps = {run.accounts.tokens(run.steps):,} tokens,"
        f" {epochs:.2f} epochs of {prepared.mixture.tokens:,}"
    )
    if run.place is not None and (name := run.place.stage.name):
        changed = ", ".join(sorted(run.place.stage.changes)) or "nothing"
        yield f"stage '{name}': steps {run.first_step:,} to {run.last_step:,}; it changes {changed}"
    yield from task_lines(prepared)
    yield from (f"warning: {text}" for text in advice(prepared))
    if checkpoint is not None:
        yield f"resuming after step {checkpoint.step} from {checkpoint.path}"


def announce(
    here: RankOfRun,
    launch: Launch,
    rollback: Rollback | None,
    *,
    skips: Skips,
    stages: MeasuredStages | None,
    border: bool = False,
) -> None:
    """Prints and records how an attempt begins: started, resumed (with changed fields), or rolled back.

    Args:
        rollback: the rollback that led back to the checkpoint; None without one.
        skips: data that the run leaves out.
        stages: speeds of the pipeline stages, if measured.
        border: whether this process has trained the stage before, and goes on with the next.
    """
    checkpoint, curve = here.checkpoint, here.curve
    if rollback is not None:
        assert checkpoint is not None
        here.say(rollback.message(checkpoint.step))
        here.record(checkpoint.step, **rollback.event(skips))
        return
    for line in opening_lines(here.prepared, here.engine, launch, checkpoint):
        here.say(line)
    if stages is not None:
        here.say(stages.line())
        here.record(here.done, event="stages", **stages.row())
    if checkpoint is None:
        here.record(0, event="started", world_size=launch.world_size)
        return
    name = here.run.accounts.name(checkpoint.step + 1)
    here.record(
        checkpoint.step,
        event="stage" if border else "resumed",
        world_size=launch.world_size,
        **({"stage": name} if name else {}),
    )
    fields = changes_since(checkpoint, curve)
    for line in describe_changes(fields):  # changes allowed by `run.allow_change` leave a trace
        here.say(f"changed since the checkpoint: {line}")
    rates = learning_rate_change(checkpoint, checkpoint.manifest.details["curve"], curve)
    if rates:
        here.say(rates)
    if fields:
        here.record(checkpoint.step, event="changed", fields=[list(row) for row in fields])


def loaded_line(read: Mapping[str, int]) -> str:
    """Tells how many bytes of the checkpoint came from each source (`checkpoint.memory.shard_files.ReadBytes`)."""
    memory, others, files = (read[name] / 1e6 for name in ("memory", "other_nodes", "run_dir"))
    more = f", {others:,.1f} MB from that of other nodes" if others else ""
    return f"read {memory:,.1f} MB of the checkpoint from memory{more}, {files:,.1f} MB from the run's directory"


def closing_line(stop: Stop, *, step: int, steps: int, run_dir: Path) -> str:
    """Returns the last line of a run: it has finished, or which signal stopped it and how to continue."""
    if stop:
        return f"stopped by {stop} after step {step}: start it again to go on"
    return f"finished: {steps} steps, in {run_dir}"


def quiet_libraries(launch: Launch) -> None:
    """Silences libraries' logs on every rank; their errors, and rank 0's warnings, are still shown."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # torch 2.13 deprecates collectives that DeepSpeed 0.19 calls at every step
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    for name in ("DeepSpeed", "deepspeed", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING if launch.rank == 0 else logging.ERROR)
