"""A finished checkpoint, and what its manifest records."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from foundation.directory import Manifest, read_manifest
from foundation.remote_directory import remote_manifest
from foundation.storage import objects_below, patiently

IMPORTED = "imported"
"""Key in a manifest's `details`: the checkpoint of another trainer that the run started from."""

MERGED = "merged"
"""Key in a manifest's `details`: method and sources of a merged checkpoint, which has no optimizer states."""
BRANCH = "branch"
"""Key in a manifest's `details`: run, step, samples and lineage of the checkpoint with which a branch began."""


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint: its directory, and the last step in it."""

    path: Path
    step: int

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's manifest; its `details` hold step, samples and the fields that determine the loss curve."""
        return read_manifest(self.path, kind="checkpoint")


@dataclass(frozen=True)
class StoredCheckpoint(Checkpoint):
    """A finished checkpoint in an object store; `path` is where its copy goes on this host.

    Attributes:
        url: URL of the checkpoint's directory in the store.
    """

    url: str = ""

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's manifest, read from the store."""
        return patiently(partial(remote_manifest, self.url))

    def damage(self, manifest: Manifest) -> str | None:
        """Describes the first file that is missing or differs in size from the manifest; None if all are intact.

        Raises:
            StorageError: the store cannot be listed.
        """
        there = objects_below(self.url)
        for name, entry in manifest.files.items():
            if name not in there or there[name].bytes != entry["bytes"]:
                return f"{name} is missing or has another size"
        return None


@dataclass(frozen=True)
class CheckpointInfo:
    """Contents of a checkpoint's manifest besides its files."""

    step: int
    config: dict[str, Any]
    parents: dict[str, Any]
    details: dict[str, Any]
