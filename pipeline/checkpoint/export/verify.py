"""Verifies a checkpoint against its manifest: every byte, every tensor, every shape. Needs no GPU or process group.

The checks run in this order, each only if all before it passed:

1. the manifest, and that every file it lists exists with its size;
2. the SHA-256 of every file;
3. the metadata: the shards of every tensor cover it exactly once, and each lies where the metadata says;
4. the tensors: names and shapes are those of the manifest's model, with all states of its optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from foundation.directory import Manifest, sha256_of_file
from foundation.errors import CheckpointError, DataError, HeadraceError
from pipeline.checkpoint.checkpoint import MERGED, Checkpoint
from pipeline.checkpoint.format.coverage import coverage_errors
from pipeline.checkpoint.format.metadata import metadata_name, read_metadata, storage_errors
from pipeline.checkpoint.format.shard_table import StoredTensor
from pipeline.checkpoint.named_state import OUTER_STATES, parameter_keys, weight_key
from pipeline.config.sections.optimizers import kind_of


@dataclass(frozen=True)
class Problem:
    """A problem found in a checkpoint.

    Attributes:
        place: name of the file or tensor.
        what: description of the problem.
    """

    place: str
    what: str


def verify_checkpoint(
    checkpoint: Checkpoint, *, progress: Callable[[int], None] = lambda _bytes: None
) -> list[Problem]:
    """Reads and verifies all of a checkpoint.

    Args:
        checkpoint: the checkpoint.
        progress: called with the number of bytes read, from several threads.

    Returns:
        The problems; empty if the checkpoint is intact.
    """
    try:
        manifest = checkpoint.manifest
    except HeadraceError as error:
        return [Problem("manifest.json", str(error).splitlines()[0])]
    problems = missing_files(checkpoint.path, manifest) or _changed_files(checkpoint.path, manifest, progress)
    return problems or list(_tensor_problems(checkpoint, manifest))


def missing_files(directory: Path, manifest: Manifest) -> list[Problem]:
    """Finds files that are missing or differ in size from the manifest; quick, since it reads no contents."""
    found: list[Problem] = []
    for name, entry in manifest.files.items():
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            found.append(Problem(name, error.strerror or repr(error)))
            continue
        if size != entry["bytes"]:
            found.append(Problem(name, f"has {size:,} bytes, and was written with {entry['bytes']:,}"))
    return found


def _changed_files(directory: Path, manifest: Manifest, progress: Callable[[int], None]) -> list[Problem]:
    def check(name: str) -> Problem | None:
        try:
            found = sha256_of_file(directory / name, progress)
        except OSError as error:
            return Problem(name, f"cannot be read: {error.strerror}")
        same = found == manifest.files[name]["sha256"]
        return None if same else Problem(name, "does not have the checksum it was written with")

    # hashlib releases the interpreter lock, and one core is slower than a disk
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return [problem for problem in threads.map(check, manifest.files) if problem]


def _tensor_problems(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[Problem]:
    try:
        metadata = read_metadata(checkpoint.path)
    except CheckpointError as error:
        yield Problem(metadata_name(checkpoint.path), str(error))
        return
    yield from (Problem(*each) for each in coverage_errors(metadata.table))
    sizes = {name: int(entry["bytes"]) for name, entry in manifest.files.items()}
    yield from (Problem(*each) for each in storage_errors(metadata, sizes))
    yield from _model_problems(metadata.tensors, manifest)


def _model_problems(stored: Sequence[StoredTensor], manifest: Manifest) -> Iterator[Problem]:
    """Yields tensors of the manifest's model that are missing or have another shape, and tensors foreign to it."""
    if "hf_config" not in manifest.details:  # a custom training loop does not record its model
        return
    from pipeline.checkpoint.export import trained_model  # noqa: PLC0415  imports transformers, seconds

    kind = kind_of(manifest.config.get("optimizer", {}))
    kind = kind.with_ema() if manifest.config.get("run", {}).get("ema") else kind
    try:
        shapes, buffers = trained_model.trained_shapes(manifest), trained_model.trained_buffers(manifest)
        matrices = {} if kind.rest is None else trained_model.trained_matrices(manifest)
    except DataError as error:
        yield Problem("manifest.json", f"describes a model that cannot be built: {error}")
        return
    kinds = {name: kind.of(matrix=name in matrices) for name in shapes}
    merged = MERGED in manifest.details  # weights alone
    needed = {
        key: tuple(shape)
        for name, shape in shapes.items()
        for key in ([weight_key(name)] if merged else parameter_keys(name, kinds[name]))
    }
    if "island" in manifest.details:
        needed |= {f"{key}/{name}": tuple(shape) for key in OUTER_STATES for name, shape in shapes.items()}
    if any(each.key.startswith("buffer/") for each in stored):  # older versions stored no buffers
        needed |= {f"buffer/{name}": tuple(shape) for name, shape in buffers.items()}
    found = {each.key: each.shape for each in stored if "/" in each.key}
    for key in sorted(needed.keys() | found.keys()):
        if key not in found:
            yield Problem(key, f"is missing; the model has it as {needed[key]}")
        elif key not in needed:
            yield Problem(key, "belongs to no parameter or persistent buffer of the model")
        elif found[key] != needed[key]:
            yield Problem(key, f"has shape {found[key]}; the model has it as {needed[key]}")
