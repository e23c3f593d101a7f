"""Files that headrace ships: configs, job scripts and the demo, by the name that they have in the repository.

They are in `headrace/share/`: a checkout has links to the top-level folders there, and a wheel has the files.
"""

from __future__ import annotations

from pathlib import Path

SHARE = Path(__file__).resolve().parents[1] / "headrace" / "share"


def find_shipped(path: str | Path) -> Path | None:
    """The shipped file of a relative path such as `ds_configs/zero3.json`; None where there is none."""
    path = Path(path)
    if path.is_absolute() or ".." in path.parts:
        return None
    found = SHARE / path
    return found if found.is_file() else None
