"""The held-out evaluation of a checkpoint, from the journal of its run."""

from __future__ import annotations

from typing import Any

from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.runtime.metrics.journal import NAME, read_rows


def heldout_figures(checkpoint: Checkpoint) -> dict[str, Any]:
    """The evaluation at the checkpoint's step, as a manifest's details record it.

    Returns:
        {"heldout": {"step", "loss_nats", "perplexity", "bits_per_byte"}}; {} where the run was not evaluated then.
    """
    run_dir = checkpoint.path.parent.parent
    if not (run_dir / NAME).is_file():
        return {}
    rows = [row for row in read_rows(run_dir, kind="eval") if row["step"] == checkpoint.step]
    if not rows:
        return {}
    found = {"step": checkpoint.step, "loss_nats": rows[-1]["loss"], "perplexity": rows[-1].get("perplexity")}
    return {"heldout": found | {"bits_per_byte": rows[-1].get("bits_per_byte")}}
