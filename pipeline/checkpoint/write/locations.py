"""Locations of the shards in the files, sent by each rank to rank 0 only if they differ from the previous save.

The file of a rank has the same shards in the same order at every save of a plan. If all places stay the same, rank 0
writes the metadata of the previous save again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foundation.errors import CheckpointError
from pipeline.checkpoint.format.metadata import encode_metadata
from pipeline.checkpoint.format.shard_table import CheckpointMetadata, Ints
from pipeline.checkpoint.write.division import Division


@dataclass(frozen=True, eq=False)
class Locations:
    """Locations of a rank's shards.

    Attributes:
        file: name of the rank's file; None if it has none.
        places: int64 [shards, 2], first byte and number of bytes of each shard, in the order of the rank's plan.
    """

    file: str | None
    places: Ints

    @property
    def digest(self) -> bytes:
        """SHA-256 of the file's name and the places."""
        return hashlib.sha256(f"{self.file}\0".encode() + self.places.tobytes()).digest()


class MetadataWriter:
    """Metadata of a plan's checkpoints, on rank 0; it is encoded again only if a location has changed.

    Args:
        division: division of the plan.
    """

    def __init__(self, division: Division) -> None:
        self._division = division
        self._known: dict[int, Locations] = {}
        self._encoded: bytes | None = None

    def update(self, changed: Mapping[int, Locations]) -> None:
        """Updates the locations of the ranks whose locations have changed."""
        if changed:
            self._known |= changed
            self._encoded = None

    def encoded(self) -> bytes:
        """Returns the contents of the metadata file.

        Raises:
            CheckpointError: a rank's locations are not known.
        """
        if self._encoded is None:
            self._encoded = encode_metadata(self.metadata())
        return self._encoded

    def metadata(self) -> CheckpointMetadata:
        """Returns the metadata.

        Raises:
            CheckpointError: a rank's locations are not known.
        """
        division = self._division
        files: dict[str, int] = {}
        file, position, length = np.full((3, len(division.table)), -1, dtype=np.int64)
        for rank in range(division.ranks):
            rows, found = division.written_by(rank), self._known.get(rank)
            if found is None or len(found.places) != len(rows):
                raise CheckpointError(f"rank {rank} has not reported where its {len(rows)} shards lie")
            if found.file is not None:
                file[rows] = files.setdefault(found.file, len(files))
                position[rows], length[rows] = found.places.T
        return CheckpointMetadata(division.table, tuple(files), file, position, length)
