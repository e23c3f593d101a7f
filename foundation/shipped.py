"""Files that headrace ships: configs, job scripts and the demo, by their names in the repository.

They are in `headrace/share/`, which has links to top-level folders in a checkout, and the files in a wheel.
"""

from __future__ import annotations

from pathlib import Path

SHARE = Path(__file__).resolve().parents[1] / "headrace" / "share"


def find_shipped(path: str | Path) -> Path | None:
    """Finds the shipped file for a relative path such as `ds_configs/zero3.json`; None if there is none."""
    path = Path(path)
    if path.is_absolute() or ".." in path.parts:
        return None
    found = SHARE / path
    return found if found.is_file() else None
