"""The checkpoints of a merge: which they are, whether they fit together, and readers of their tensors."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from foundation.directory import Manifest, check_sizes
from foundation.errors import CheckpointError, ConfigError
from foundation.storage import patiently, read_range
from pipeline.checkpoint.checkpoint import Checkpoint, StoredCheckpoint
from pipeline.checkpoint.export.find import RunPlace, checkpoints_of_steps, metadata_of
from pipeline.checkpoint.format.coverage import coverage_errors
from pipeline.checkpoint.format.shard_table import CheckpointMetadata, StoredTensor
from pipeline.checkpoint.memory.shard_files import ShardFiles
from pipeline.checkpoint.named_state import buffer_key, weight_key
from pipeline.checkpoint.read_shards import ShardReader

_FREE = {"max_position_embeddings"}
"""Fields of a Hugging Face config that may differ between the models of a merge."""


@dataclass(frozen=True)
class MergeSource:
    """A checkpoint of a merge.

    Attributes:
        place: run of the checkpoint, as the user named it.
        checkpoint: the checkpoint; a `StoredCheckpoint` is read in place, by ranges of its objects.
        manifest: its manifest.
        metadata: its tensors and their locations.
        reader: reads parts of its tensors, each stored byte once.
    """

    place: RunPlace
    checkpoint: Checkpoint
    manifest: Manifest
    metadata: CheckpointMetadata = field(repr=False)
    reader: ShardReader = field(repr=False)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors that a merge averages, by key: weights and persistent buffers."""
        prefixes = (weight_key(""), buffer_key(""))
        return {each.key: each for each in self.metadata.tensors if each.key.startswith(prefixes)}

    @property
    def name(self) -> str:
        """Path or URL of the checkpoint."""
        return self.checkpoint.url if isinstance(self.checkpoint, StoredCheckpoint) else str(self.checkpoint.path)


def choose(places: Sequence[RunPlace], *, last: int | None, steps: Sequence[int]) -> list[tuple[RunPlace, Checkpoint]]:
    """Chooses the checkpoints of a merge: run after run, each run's in ascending order of steps.

    Args:
        places: the runs, with or without a step.
        last: number of newest checkpoints of every run; None without.
        steps: steps of the checkpoints of every run; [] without. Without both, a run without a step gives its newest.

    Raises:
        CheckpointError: a run has no checkpoint of a step.
        ConfigError: a run has fewer checkpoints than `last`, or there is only one checkpoint in all.
    """
    chosen: list[tuple[RunPlace, Checkpoint]] = []
    for place in places:
        found = place.checkpoints()
        if place.step is not None:
            own = checkpoints_of_steps(place, found, [place.step])
        elif steps:
            own = checkpoints_of_steps(place, found, sorted(steps))
        else:
            own = found[: last or 1][::-1]
            if last is not None and len(own) < last:
                why = f"{place.run} has {len(own)} checkpoints, of steps {', '.join(f'{c.step:,}' for c in own)}"
                raise ConfigError("--last", last, why=why, remedy=f"use at most {len(own)}")
        chosen += [(place, each) for each in own]
    if len(chosen) < 2:
        why = f"{chosen[0][1].path} is the only checkpoint"
        raise ConfigError("RUN", places[0].run, why=why, remedy="add --last N or --steps A,B, or more runs")
    return chosen


def open_sources(chosen: Sequence[tuple[RunPlace, Checkpoint]]) -> list[MergeSource]:
    """Opens the checkpoints of a merge, and checks that they are complete and of one model. Reads no weights.

    Raises:
        CheckpointError: a checkpoint is damaged, or its model or tokenizer differs from the first one's.
        StorageError: the store cannot be read.
    """
    sources = [_open(place, checkpoint) for place, checkpoint in chosen]
    for other in sources[1:]:
        _check_same(sources[0], other)
    return sources


def _open(place: RunPlace, checkpoint: Checkpoint) -> MergeSource:
    manifest = checkpoint.manifest
    if "hf_config" not in manifest.details:
        raise CheckpointError(f"{checkpoint.path} is from a custom training loop\n  try: a run of headrace train")
    if "island" in manifest.details:
        why = "is from an island, whose weights stand between two exchanges"
        raise CheckpointError(f"{checkpoint.path} {why}\n  try: headrace export, and a merge of exported models")
    if isinstance(checkpoint, StoredCheckpoint):
        if damage := checkpoint.damage(manifest):
            raise CheckpointError(f"{checkpoint.url} is damaged: {damage}\n  try: another checkpoint of the run")
        files = ShardFiles(checkpoint.path, source=_Objects(checkpoint.url))
    else:
        check_sizes(checkpoint.path, manifest)
        files = ShardFiles(checkpoint.path)
    metadata = metadata_of(checkpoint)
    for key, error in coverage_errors(metadata.table):
        raise CheckpointError(f"{checkpoint.path}: {key}: {error}\n  try: headrace checkpoint verify {checkpoint.path}")
    return MergeSource(place, checkpoint, manifest, metadata, ShardReader(checkpoint.path, metadata, files, once=True))


def _check_same(first: MergeSource, other: MergeSource) -> None:
    names = [str(each.name) for each in (first, other)]
    one, two = ({k: tuple(t.shape) for k, t in each.tensors.items()} for each in (first, other))
    if one != two:
        differing = {key for key, _ in one.items() ^ two.items()}
        key = min(differing & one.keys() & two.keys() or differing)
        shapes = [str(shapes.get(key, "none")) for shapes in (one, two)]
        raise _different(names, f"{key} has shape {shapes[0]} in the first and {shapes[1]} in the second")
    tokenizers = [each.manifest.details["tokenizer"].get("fingerprint") for each in (first, other)]
    if tokenizers[0] != tokenizers[1]:
        raise _different(names, "their tokenizers differ: the same token id means different text")
    configs: list[Mapping[str, Any]] = [each.manifest.details["hf_config"] for each in (first, other)]
    keys = sorted(configs[0].keys() | configs[1].keys())
    changed = [key for key in keys if key not in _FREE and configs[0].get(key) != configs[1].get(key)]
    if changed:
        values = " and ".join(repr(config.get(changed[0])) for config in configs)
        raise _different(names, f"model.config.{changed[0]} differs: {values}")


def _different(names: Sequence[str], why: str) -> CheckpointError:
    remedy = "merge checkpoints of one run, or of branches of one run"
    return CheckpointError(f"{names[0]} and {names[1]} cannot be merged: {why}\n  try: {remedy}")


class _Objects:
    """Files of a checkpoint in an object store; the shard that was read last stays in memory.

    Args:
        url: URL of the checkpoint's directory.
    """

    name = "run_dir"

    def __init__(self, url: str) -> None:
        self._url = url
        self._kept: tuple[tuple[str, int], bytes] = (("", 0), b"")

    @contextmanager
    def opened(self, file: str, begin: int, length: int) -> Iterator[IO[bytes]]:
        """Implements `ShardSource.opened`."""
        if self._kept[0] != (file, begin):
            self._kept = (("", 0), b"")
            self._kept = ((file, begin), patiently(partial(read_range, f"{self._url}/{file}", begin, length)))
        yield io.BytesIO(self._kept[1])
