"""Summary of a run as pairs of term and text, from its manifest, journal and newest checkpoint's manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foundation.configfile import ConfigTree
from foundation.directory import Manifest, read_manifest
from foundation.errors import DataError
from foundation.task_figures import figures_line
from pipeline.evaluation.report.runs import RunRecord
from pipeline.models.folder.model_folder import ModelFolder

SHORT = 12
"""Number of characters shown of a fingerprint, as in error messages."""


def facts(run: RunRecord, folders: Sequence[ModelFolder]) -> list[tuple[str, str]]:
    """The summary of a run.

    Args:
        run: the run.
        folders: the report's models; a model exported from this run provides the number of parameters.
    """
    checkpoint, start = _newest_checkpoint(run), run.manifest.details.get("branch")
    return [
        ("steps", _steps(run)),
        *([("branch of", f"{start['run']}, from step {start['step']:,}")] if start else []),
        ("tokens", f"{run.tokens:,}, {' to '.join(f'{each:,}' for each in run.tokens_per_step)} per step"),
        *_stages(run.manifest),
        *_parameters(run, folders),
        ("time in steps", duration(float(run.series("seconds").sum()))),
        *_last_evaluation(run),
        ("engine", _engine(run.manifest.config)),
        ("layout", _layout(run, checkpoint)),
        *_teacher(run.manifest.config),
        *_sources(run.manifest),
        *([("checkpoint", str(checkpoint))] if checkpoint else []),
        ("seed", _text(run.manifest.config, "run", "seed")),
        ("code", _code(run.manifest)),
    ]


def _steps(run: RunRecord) -> str:
    done, planned = int(run.series("step")[-1]), run.manifest.details.get("steps", 0)
    if run.manifest.details.get("finished"):
        return f"{done:,}, finished"
    return f"{done:,} of {planned:,}, not finished"


def _stages(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yields what the steps of each stage and each batch size were planned to be; nothing without stages."""
    for row in manifest.details.get("ledger") or []:
        size = f"{row['samples_per_step']:,} samples of {row['sequence_length']:,} tokens"
        text = f"steps {row['first_step']:,} to {row['last_step']:,}, {size}, {row['tokens']:,} tokens"
        yield f"stage {row['stage']}" if "stage" in row else "batch ramp", text


def _parameters(run: RunRecord, folders: Sequence[ModelFolder]) -> Iterator[tuple[str, str]]:
    """The parameters, from a model exported from this run: its manifest has the fingerprint of the run's checkpoint."""
    own = {_checkpoint_fingerprint(path) for path in _checkpoints(run)} - {None}
    for folder in folders:
        if (folder.path / "manifest.json").is_file():
            manifest = read_manifest(folder.path, kind="model")
            if manifest.parents.get("checkpoint", {}).get("fingerprint") in own:
                yield "parameters", f"{manifest.details['parameters']:,}"
                return


def _checkpoints(run: RunRecord) -> list[Path]:
    names = (Path(row["path"]).name for row in run.events if row.get("event") == "checkpoint" and "path" in row)
    # the journal has the original path; the directory may have moved, and old checkpoints are deleted
    found = (run.path / "checkpoints" / name for name in names)
    return [path for path in found if path.is_dir()]


def _newest_checkpoint(run: RunRecord) -> Path | None:
    return next(reversed(_checkpoints(run)), None)


def _checkpoint_fingerprint(path: Path) -> str | None:
    manifest = _checkpoint_manifest(path)
    return manifest.fingerprint if manifest else None


def _checkpoint_manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path, kind="checkpoint")
    except DataError:
        return None  # deleted or damaged since; the report does not need it


def _last_evaluation(run: RunRecord) -> Iterator[tuple[str, str]]:
    if run.evaluations:
        last = run.evaluations[-1]
        per_byte = f", {last['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in last else ""
        yield "held-out", f"{last['loss']:.4f} nats per token{per_byte} at step {last['step']:,}"
    for task, rows in run.tasks.items():
        yield task, f"{figures_line(rows[-1])} at step {rows[-1]['step']:,}"


def _engine(config: ConfigTree) -> str:
    engine = _text(config, "engine")
    sharding = f", ZeRO-{_text(config, 'zero_optimization', 'stage')}" if engine == "deepspeed" else ""
    return f"{engine}{sharding}, {'bf16' if _at(config, 'bf16', 'enabled') else 'fp32'}"


def _layout(run: RunRecord, checkpoint: Path | None) -> str:
    manifest = _checkpoint_manifest(checkpoint) if checkpoint else None
    if manifest and "topology" in manifest.details:
        return str(manifest.details["topology"])
    sizes = [row["world_size"] for row in run.events if "world_size" in row]
    return f"{sizes[-1]} processes" if sizes else "not recorded"


def _teacher(config: ConfigTree) -> Iterator[tuple[str, str]]:
    teacher = _at(config, "distill", "logits") or _at(config, "distill", "teacher")
    if teacher is not None:
        temperature, alpha = _text(config, "distill", "temperature"), _text(config, "distill", "alpha")
        yield "distilled from", f"{teacher} (temperature {temperature}, alpha {alpha})"


def _sources(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for key, parent in manifest.parents.items():
        if key.startswith("data."):
            yield "dataset", f"{str(parent['fingerprint'])[:SHORT]} ({parent['path']})"


def _code(manifest: Manifest) -> str:
    commit = manifest.code.get("commit")
    return f"headrace {manifest.code.get('headrace')}" + (f", commit {commit[:SHORT]}" if commit else "")


def duration(seconds: float) -> str:
    """Two units at most: 4.9 s, 3 min 20 s, 5 h 12 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:,.0f} h {seconds % 3600 // 60:.0f} min"


def _at(config: ConfigTree, *keys: str) -> Any:
    """A nested value, or None if a level is absent or null."""
    here: Any = config
    for key in keys:
        here = here.get(key) if isinstance(here, dict) else None
    return here


def _text(config: ConfigTree, *keys: str) -> str:
    value = _at(config, *keys)
    return "not recorded" if value is None else str(value)
