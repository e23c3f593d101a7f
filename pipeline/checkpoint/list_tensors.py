"""Checkpoints and their tensors as rows, for people and for scripts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.base.directory import Manifest
from headrace.base.errors import HeadraceError
from pipeline.checkpoint.metadata import contents, read_metadata
from pipeline.checkpoint.store import Checkpoint
from pipeline.checkpoint.verify import missing_files

Row = dict[str, Any]


def checkpoint_rows(checkpoints: Sequence[Checkpoint]) -> list[Row]:
    """One row per checkpoint, newest first; `resumed` is the one that a resume would take, as far as sizes tell."""
    rows = [_row(each) for each in checkpoints]
    taken = next((row for row in rows if row["damage"] is None), None)
    return [{**row, "resumed": row is taken} for row in rows]


def _row(checkpoint: Checkpoint) -> Row:
    row: Row = {"step": checkpoint.step, "path": str(checkpoint.path)}
    try:
        manifest = checkpoint.manifest
    except HeadraceError as error:
        return {**row, "samples": None, "layout": None, "bytes": None, "written": None, "damage": _first_line(error)}
    wrong = missing_files(checkpoint.path, manifest)
    return {
        **row,
        "samples": manifest.details.get("samples"),
        "layout": layout_of(manifest),
        "bytes": sum(int(entry["bytes"]) for entry in manifest.files.values()),
        "written": (checkpoint.path / "manifest.json").stat().st_mtime,
        "damage": f"{wrong[0].place} {wrong[0].what}" if wrong else None,
    }


def layout_of(manifest: Manifest) -> str:
    """Engine, ZeRO stage and mesh, of a run; the engine alone, of a loop of somebody's own."""
    engine = manifest.details.get("engine") or manifest.config.get("engine") or "?"
    stage = (manifest.config.get("zero_optimization") or {}).get("stage")
    parts = [f"{engine} stage {stage}" if stage is not None else str(engine), manifest.details.get("topology")]
    return ", ".join(str(part) for part in parts if part)


def unfinished(run: Path) -> list[str]:
    """Names of what is being written, or was when a run was killed."""
    return sorted(path.name for path in (run / "checkpoints").glob(".step-*.partial"))


def tensor_rows(checkpoint: Checkpoint) -> list[Row]:
    """One row per tensor.

    Raises:
        CheckpointError: the metadata cannot be read.
    """
    return [
        {
            "name": each.key,
            "shape": list(each.shape),
            "dtype": str(each.dtype).removeprefix("torch."),
            "bytes": each.bytes,
            "pieces": len(each.pieces),
        }
        for each in contents(read_metadata(checkpoint.path))
    ]


def checkpoint_table(rows: Sequence[Row]) -> Table:
    """Checkpoints for a terminal."""
    table = Table()
    for name, justify in (("step", "right"), ("samples", "right"), ("layout", "left"), ("size", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("written")
    table.add_column("")
    for row in rows:
        state = f"damaged: {row['damage']}" if row["damage"] else "a resume takes this one" if row["resumed"] else ""
        samples = "" if row["samples"] is None else f"{row['samples']:,}"
        size = "" if row["bytes"] is None else in_words(row["bytes"])
        table.add_row(str(row["step"]), samples, row["layout"] or "", size, _ago(row["written"]), state)
    return table


def tensor_table(rows: Sequence[Row], title: str) -> Table:
    """Tensors for a terminal."""
    table = Table(title=title)
    for name in ("tensor", "shape", "dtype"):
        table.add_column(name, overflow="fold")
    for name in ("size", "pieces"):
        table.add_column(name, justify="right")
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) or "-"
        table.add_row(row["name"], shape, row["dtype"], in_words(row["bytes"]), str(row["pieces"]))
    return table


def in_words(size: float) -> str:
    """Bytes in the unit that fits, e.g. 1.2 GB; 1 GB is 1e9 bytes."""
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
