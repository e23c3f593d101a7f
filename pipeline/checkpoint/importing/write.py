"""Writes a checkpoint of a run from tensors of another trainer."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.checkpoint.checkpoint import Checkpoint, CheckpointInfo
from pipeline.checkpoint.format.metadata import METADATA, encode_metadata
from pipeline.checkpoint.store import CheckpointStore
from pipeline.checkpoint.write.streamed import LazyTensor, Progress, write_streamed
from pipeline.checkpoint.write.write_shards import write_metadata


def write_checkpoint(
    store: CheckpointStore, info: CheckpointInfo, tensors: Mapping[str, LazyTensor], progress: Progress
) -> Checkpoint:
    """Writes and commits a checkpoint, in one process.

    Args:
        store: checkpoint store of the run.
        info: contents of the manifest.
        tensors: key of `named_state` -> tensor.
        progress: called with (bytes written, all bytes).

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError, RuntimeError: a file cannot be written.
    """
    staging = store.create_staging(info.step)
    try:
        metadata, sha256 = write_streamed(tensors, staging, progress)
        return store.commit(info, {**sha256, METADATA: write_metadata(encode_metadata(metadata), staging)})
    except BaseException:
        store.discard_staging(info.step)
        raise
