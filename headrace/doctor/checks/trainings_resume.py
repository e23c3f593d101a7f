"""A training saves during its steps; one process resumes from the checkpoint, bit for bit, and its losses go on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foundation.directory import read_manifest, verify
from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.shared import finish, judged, small_run, start
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
    config = small.config(folder, checkpoint_every=2, keep_checkpoints=4)
    finish(start(config, folder, ranks=small.ranks), folder, within_s=0.6 * context.limit_s)
    saved = folder / "run" / "checkpoints" / f"step-{_SAVED:08d}"
    damaged = [name for name, good in verify(saved, read_manifest(saved, kind="checkpoint")) if not good]
    if damaged:
        remedy = "check the file system of run.dir, its disks, and the memory of this host"
        yield Finding(False, f"The checkpoint has damaged files: {', '.join(damaged[:4])}.", _LOST, remedy)
        return
    (context.work / "saved").mkdir()
    (context.work / "saved" / f"step-{_SAVED}").symlink_to(saved)
    case = small.shrunk.reference("resumes", precision=small.precision, tokens=small.tokens)
    case = replace(case, save=(), resume_from=("saved", _SAVED), resave=True)
    result = run_cases([case], context.work, gpus=small.gpus)[case.name]
    if result.error is not None:
        error = result.error.splitlines()[-1]
        yield Finding(False, f"One process could not resume: {error}", _LOST, "headrace checkpoint verify the step")
        return
    ours, theirs = _state(saved), _state(result.state(_SAVED))
    changed = [k for k in sorted({*ours, *theirs}) if k not in ours or k not in theirs or not ours[k].equal(theirs[k])]
    text = f"Of {len(ours)} tensors that {small} saved during steps and one process loaded, {len(changed)} differ"
    text += f": {', '.join(changed[:4])}." if changed else " by a bit."
    yield judged(not changed, text, _LOST, "do not resume in another layout here", {"tensors": len(ours)})
    losses = {row["step"]: row["loss"] for row in read_rows(folder / "run", kind="step")}
    away = max(abs(loss / losses[step] - 1) for step, loss in result.resumed_losses.items())
    allowed = LOSS_FP32 if small.precision == "fp32" else UNIT_ROUNDOFF[small.precision]
    text = f"The losses after the resume differ by {away:.1e} (tolerance {allowed:.1e})."
    yield judged(away <= allowed, text, "a resumed run would leave its curve", "headrace prove", {"difference": away})


def _state(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by key."""
    metadata = read_metadata(directory)
    state = {each.key: torch.empty(each.shape, dtype=each.dtype) for each in metadata.tensors}
    ShardReader(directory, metadata).read(state)
    return state
