"""A training saves during its steps; one process resumes from the checkpoint, bit for bit, and its losses go on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from foundation.directory import read_manifest, verify
from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.small_runs import small_run, start
from pipeline.checkpoint.format.metadata import read_metadata
from pipeline.checkpoint.read_shards import ShardReader
from pipeline.plan.proof.tolerance import LOSS_FP32, UNIT_ROUNDOFF
from pipeline.plan.proof.worker import run_cases
from pipeline.runtime.metrics.journal import read_rows

_STEPS, _SAVED = 8, 4
_LOST = "a run would lose or change its state at the next failure"


def run(context: Context) -> Iterable[Finding]:
    """Runs the check.

    Raises:
        TrainingError: the training that saves has failed.
    """
    small, folder = small_run(context, steps=_STEPS), context.work / "saves"
    topology, config = small.shrunk.topology, small.config(folder, checkpoint_every=2, keep_checkpoints=4)
    start(config, folder, processes=topology.world_size).finish(0.6 * context.limit_s)
    saved = folder / "run" / "checkpoints" / f"step-{_SAVED:08d}"
    damaged = [name for name, good in verify(saved, read_manifest(saved, kind="checkpoint")) if not good]
    if damaged:
        remedy = "check the file system of run.dir, its disks, and the memory of this host"
        yield Finding(False, f"The checkpoint has damaged files: {', '.join(damaged[:4])}.", _LOST, remedy)
        return
    (context.work / "saved").mkdir()
    (context.work / "saved" / f"step-{_SAVED}").symlink_to(saved)
    precision = small.shrunk.precision if small.gpus else "fp32"
    case = small.shrunk.reference("resumes", precision=precision, tokens=small.tokens)
    result = run_cases(
        [replace(case, save=(), resume_from=("saved", _SAVED), resave=True)],
        context.work,
        gpus=small.gpus,
    )["resumes"]
    if result.error is not None:
        error = result.error.splitlines()[-1]
        yield Finding(False, f"One process could not resume: {error}", _LOST, "headrace checkpoint verify the step")
        return
    changed, count = _different(saved, result.state(_SAVED))
    about = f"{count} tensors that {small.place} ({topology}) saved during steps and one process loaded"
    if changed:
        text = f"Of {about}, {len(changed)} differ: {', '.join(changed[:4])}."
        yield Finding(False, text, _LOST, "do not resume in another layout here; report it with the layout")
    else:
        yield Finding(True, f"All {about} are equal bit for bit.", figures={"tensors": count})
    losses = {row["step"]: row["loss"] for row in read_rows(folder / "run", kind="step")}
    away = max(abs(loss - losses[step]) / abs(losses[step]) for step, loss in result.resumed_losses.items())
    allowed = LOSS_FP32 if precision == "fp32" else UNIT_ROUNDOFF[precision]
    text, figures = f"The losses after the resume differ by {away:.1e} (tolerance {allowed:.1e})", {"difference": away}
    if away <= allowed:
        yield Finding(True, f"{text}.", figures=figures)
    else:
        yield Finding(False, f"{text}.", "a resumed run would leave its curve", "headrace prove --config F", figures)


def _different(first: Path, second: Path) -> tuple[list[str], int]:
    """Keys of tensors that are not equal in two states, or that one of them lacks; and the number of all."""
    states = []
    for directory in (first, second):
        metadata = read_metadata(directory)
        state = {each.key: torch.empty(each.shape, dtype=each.dtype) for each in metadata.tensors}
        ShardReader(directory, metadata).read(state)
        states.append(state)
    ours, theirs = states
    keys = sorted({*ours, *theirs})
    return [key for key in keys if key not in ours or key not in theirs or not ours[key].equal(theirs[key])], len(keys)
