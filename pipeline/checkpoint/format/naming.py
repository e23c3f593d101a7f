"""Directory names of checkpoints, and the finished checkpoints of a run. No torch: `pipeline.plan.check` uses it."""

from __future__ import annotations

from pathlib import Path

FOLDER = "checkpoints"
LATEST = "latest"
PREFIX = "step-"


def step_of(name: str) -> int | None:
    """Returns the step in the name of a finished checkpoint; None for other names."""
    number = name.removeprefix(PREFIX)
    return int(number) if number != name and number.isdigit() else None


def finished_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Steps and directories of the finished checkpoints of a run, newest first."""
    found = ((step_of(path.name), path) for path in (run_dir / FOLDER).glob(f"{PREFIX}*"))
    return sorted(((step, path) for step, path in found if step is not None), reverse=True)
