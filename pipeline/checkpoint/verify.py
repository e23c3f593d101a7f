"""Is a checkpoint what its manifest says: every byte, every tensor, every shape. Without a GPU or a process group.

Looked at in this order, each only when what it rests on is sound:

1. the manifest, and that every file it lists is there in full;
2. the SHA-256 of every file;
3. the metadata: the pieces of every tensor cover it exactly once, and each lies where it is said to lie;
4. the tensors: those of the model that the manifest describes, in its shapes, with both moments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.base.directory import Manifest, sha256_of_file
from headrace.base.errors import CheckpointError, DataError, HeadraceError
from pipeline.checkpoint.metadata import StoredTensor, contents, misfit, misplaced, read_metadata
from pipeline.checkpoint.store import Checkpoint

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with a checkpoint.

    Attributes:
        place: a file or a tensor.
        what: in words.
    """

    place: str
    what: str


def verify_checkpoint(
    checkpoint: Checkpoint, *, progress: Callable[[int], None] = lambda _bytes: None
) -> list[Problem]:
    """Reads all of a checkpoint.

    Args:
        checkpoint: which.
        progress: called with numbers of bytes, from several threads.

    Returns:
        what is wrong; nothing when it is whole.
    """
    try:
        manifest = checkpoint.manifest
    except HeadraceError as error:
        return [Problem("manifest.json", str(error).splitlines()[0])]
    wrong = missing_files(checkpoint.path, manifest) or _changed_files(checkpoint.path, manifest, progress)
    return wrong or list(_wrong_tensors(checkpoint, manifest))


def missing_files(directory: Path, manifest: Manifest) -> list[Problem]:
    """Files that are not there, or not in the size that the manifest says: quick, reads nothing."""
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
    def look(name: str) -> Problem | None:
        try:
            found = sha256_of_file(directory / name, progress)
        except OSError as error:
            return Problem(name, f"cannot be read: {error.strerror}")
        same = found == manifest.files[name]["sha256"]
        return None if same else Problem(name, "does not have the checksum it was written with")

    # SHA-256 lets go of the interpreter's lock, and one core does not keep up with a disk
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return [problem for problem in threads.map(look, manifest.files) if problem]


def _wrong_tensors(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[Problem]:
    try:
        metadata = read_metadata(checkpoint.path)
    except CheckpointError as error:
        yield Problem(".metadata", str(error))
        return
    stored = contents(metadata)
    for each in stored:
        wrong = misfit(each)
        if wrong is not None:
            yield Problem(each.key, wrong)
    sizes = {name: int(entry["bytes"]) for name, entry in manifest.files.items()}
    yield from (Problem(*each) for each in misplaced(metadata, sizes))
    yield from _not_the_model(stored, manifest)


def _not_the_model(stored: Sequence[StoredTensor], manifest: Manifest) -> Iterator[Problem]:
    """Tensors that the manifest's model lacks, or has in another shape, or that are not there."""
    if "hf_config" not in manifest.details:  # of a loop of somebody's own: what it trains is not said
        return
    from pipeline.checkpoint.trained_model import trained_shapes  # noqa: PLC0415  brings transformers, seconds

    try:
        shapes = trained_shapes(manifest)
    except DataError as error:
        yield Problem("manifest.json", f"describes a model that cannot be built: {error}")
        return
    needed = {f"{kind}/{name}": tuple(shape) for name, shape in shapes.items() for kind in ("weight", *MOMENTS)}
    found = {each.key: each.shape for each in stored if "/" in each.key}
    for key in sorted(needed.keys() | found.keys()):
        if key not in found:
            yield Problem(key, f"is not there; the model has it as {needed[key]}")
        elif key not in needed:
            yield Problem(key, "belongs to no parameter of the model")
        elif found[key] != needed[key]:
            yield Problem(key, f"has shape {found[key]}; the model has it as {needed[key]}")
