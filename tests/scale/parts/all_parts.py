"""Every part, by name."""

from __future__ import annotations

from tests.scale.parts import (
    checkpoints,
    copies,
    data,
    islands,
    journals,
    merging,
    planning,
    preparation,
    processes,
    rendezvous,
    skips,
)

_MODULES = (
    *(processes, rendezvous, islands, checkpoints, copies, data, skips, journals),
    *(planning, preparation, merging),
)
PARTS = {part.name: part for module in _MODULES for part in module.PARTS}
