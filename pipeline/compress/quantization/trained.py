"""A trained run as a quantization's model: its checkpoint is first exported into the work directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foundation.directory import MANIFEST, read_manifest
from foundation.errors import DataError, HeadraceError
from foundation.paths import is_store_url
from foundation.remote_output import check_output, local_output
from pipeline.checkpoint.format.naming import FOLDER
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.rules import LAYERS, work_path
from pipeline.data.dataset import TokenDataset

_EXPORT = "model"


def is_trained(path: Path) -> bool:
    """Whether a path is a run directory or one of its checkpoints, by its files."""
    return (path / FOLDER).is_dir() or (path.resolve().parent.name == FOLDER and (path / MANIFEST).is_file())


@contextmanager
def model_folder(config: QuantizeConfig) -> Iterator[Path | None]:
    """Yields the folder to quantize: None for `config.model` itself, or an export of a run's newest checkpoint.

    A checkpoint of any layout is exported once: the export that a killed process left is reused. If the block ends with
    an error before any layer was calibrated, the export is deleted.

    Raises:
        ConfigError: the output exists.
        CheckpointError: the run has no checkpoint, or it cannot be exported.
        DataError: the dataset of `config.data` is missing or damaged.
    """
    if is_store_url(config.model) or not is_trained(Path(config.model)):
        yield None
        return
    check_output(config.output)
    TokenDataset.open(config.data.path, split=config.data.split, sequence_length=config.data.sequence_length)
    try:
        yield _exported(Path(config.model), work_path(local_output(config.output)) / _EXPORT)
    except HeadraceError:
        work = work_path(local_output(config.output))
        if not (work / LAYERS).exists():  # nothing was calibrated on it
            shutil.rmtree(work, ignore_errors=True)
        raise


def _exported(run: Path, out: Path) -> Path:
    from pipeline.checkpoint.export.export import export  # noqa: PLC0415  (brings in torch)
    from pipeline.checkpoint.export.find import find_checkpoint  # noqa: PLC0415

    checkpoint = find_checkpoint(run)
    try:
        same = read_manifest(out, kind="model").parents["checkpoint"]["fingerprint"] == checkpoint.manifest.fingerprint
    except DataError:
        same = False
    if not same:
        out.parent.mkdir(parents=True, exist_ok=True)
        # the decoder of a multimodal model is quantized alone
        alone = (checkpoint.manifest.details.get("extra_weights") or {}).get("multimodal")
        export(checkpoint, out, extra="drop" if alone else None, replace=True)
    return out
