"""The held-out and task evaluation of a checkpoint, from the journal of its run."""

from __future__ import annotations

from typing import Any

from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.runtime.metrics.journal import NAME, newest_figures, read_rows
from pipeline.runtime.metrics.sinks import HELD_OUT, TASK


def heldout_figures(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the evaluation at the checkpoint's step, in the form of a manifest's details.

    Returns:
        {"heldout": {"step", "loss_nats", "perplexity", "bits_per_byte"}, "tasks": {task: {"step", figures}}};
        evaluations that the run did not make at the step are left out.
    """
    run_dir = checkpoint.path.parent.parent
    if not (run_dir / NAME).is_file():
        return {}
    rows = [row for row in read_rows(run_dir, kind=(HELD_OUT, TASK)) if row["step"] == checkpoint.step]
    tasks = newest_figures(rows)
    found: dict[str, Any] = {"tasks": tasks} if tasks else {}
    if heldout := [row for row in rows if row["kind"] == HELD_OUT]:
        row = heldout[-1]
        names = {"loss_nats": "loss", "perplexity": "perplexity", "bits_per_byte": "bits_per_byte"}
        found["heldout"] = {"step": checkpoint.step} | {name: row.get(key) for name, key in names.items()}
    return found
