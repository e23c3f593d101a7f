"""Lists checkpoints and their tensors as rows (for `--json`) and as tables (for a terminal)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from foundation.directory import Manifest
from foundation.errors import HeadraceError
from foundation.paths import is_url
from pipeline.checkpoint.checkpoint import Checkpoint, StoredCheckpoint
from pipeline.checkpoint.export.verify import missing_files
from pipeline.checkpoint.format.metadata import read_metadata

Row = dict[str, Any]


def checkpoint_rows(checkpoints: Sequence[Checkpoint]) -> list[Row]:
    """Makes a row per checkpoint, newest first; `resumed` marks the one a resume would choose, judged by file sizes."""
    rows = [_row(each) for each in checkpoints]
    resumed = next((row for row in rows if row["damage"] is None), None)
    return [{**row, "resumed": row is resumed} for row in rows]


def _row(checkpoint: Checkpoint) -> Row:
    where = checkpoint.url if isinstance(checkpoint, StoredCheckpoint) else str(checkpoint.path)
    row: Row = {"step": checkpoint.step, "path": where}
    try:
        manifest = checkpoint.manifest
    except HeadraceError as error:
        return {**row, "samples": None, "layout": None, "bytes": None, "written": None, "damage": _first_line(error)}
    if isinstance(checkpoint, StoredCheckpoint):
        damage, written = checkpoint.damage(manifest), None
    else:
        problems = missing_files(checkpoint.path, manifest)
        damage = f"{problems[0].place} {problems[0].what}" if problems else None
        written = (checkpoint.path / "manifest.json").stat().st_mtime
    return {
        **row,
        "samples": manifest.details.get("samples"),
        "layout": _layout(manifest),
        "bytes": manifest.bytes,
        "written": written,
        "damage": damage,
    }


def _layout(manifest: Manifest) -> str:
    """Describes engine, ZeRO stage and mesh of a run; only the engine for a custom training loop."""
    engine = manifest.details.get("engine") or manifest.config.get("engine") or "?"
    stage = (manifest.config.get("zero_optimization") or {}).get("stage")
    parts = [f"{engine} stage {stage}" if stage is not None else str(engine), manifest.details.get("topology")]
    return ", ".join(str(part) for part in parts if part)


def unfinished_checkpoints(run: Path) -> list[str]:
    """Returns the names of staging directories: checkpoints being written, or left half-written by a killed run."""
    return sorted(path.name for path in (run / "checkpoints").glob(".step-*.partial"))


def tensor_rows(checkpoint: Checkpoint) -> list[Row]:
    """Makes one row per tensor.

    Raises:
        CheckpointError: the metadata cannot be read.
    """
    metadata = read_metadata(checkpoint.path)
    return [
        {
            "name": each.key,
            "shape": list(each.shape),
            "dtype": str(each.dtype).removeprefix("torch."),
            "bytes": each.bytes,
            "pieces": len(metadata.table.rows(number)),
        }
        for number, each in enumerate(metadata.tensors)
    ]


def checkpoint_table(rows: Sequence[Row]) -> Table:
    """Makes the table of checkpoints."""
    table = Table()
    for name, justify in (("step", "right"), ("samples", "right"), ("layout", "left"), ("size", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("written")
    table.add_column("")
    for row in rows:
        state = f"damaged: {row['damage']}" if row["damage"] else "a resume takes this one" if row["resumed"] else ""
        state += f"{', ' if state else ''}in the object store" if is_url(row["path"]) else ""
        samples = "" if row["samples"] is None else f"{row['samples']:,}"
        size = "" if row["bytes"] is None else format_bytes(row["bytes"])
        table.add_row(str(row["step"]), samples, row["layout"] or "", size, _ago(row["written"]), state)
    return table


def tensor_table(rows: Sequence[Row], title: str) -> Table:
    """Makes the table of tensors."""
    table = Table(title=title)
    for name in ("tensor", "shape", "dtype"):
        table.add_column(name, overflow="fold")
    for name in ("size", "shards"):
        table.add_column(name, justify="right")
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) or "-"
        table.add_row(row["name"], shape, row["dtype"], format_bytes(row["bytes"]), str(row["pieces"]))
    return table


def format_bytes(size: float) -> str:
    """Formats bytes in a fitting unit, e.g. 1.2 GB; 1 GB is 1e9 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def _ago(written: float | None) -> str:
    if written is None:
        return ""
    seconds = max(0.0, time.time() - written)
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        count = int(seconds // length)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
