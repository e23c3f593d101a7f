"""What the checkpoints of a run are called. No torch: a job script asks how far a run has got."""

from __future__ import annotations

from pathlib import Path

FOLDER = "checkpoints"
LATEST = "latest"
PREFIX = "step-"


def step_of(name: str) -> int | None:
    """The step that the name of a finished checkpoint tells; None of other names."""
    number = name.removeprefix(PREFIX)
    return int(number) if number != name and number.isdigit() else None


def finished(run_dir: Path) -> list[tuple[int, Path]]:
    """Steps and directories of the finished checkpoints of a run, newest first."""
    found = ((step_of(path.name), path) for path in (run_dir / FOLDER).glob(f"{PREFIX}*"))
    return sorted(((step, path) for step, path in found if step is not None), reverse=True)
