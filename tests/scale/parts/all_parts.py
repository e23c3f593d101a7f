"""Every part, by name."""

from __future__ import annotations

from tests.scale.parts import (
    checkpoints,
    copies,
    data,
    islands,
    journals,
    merging,
    node_checks,
    planning,
    preparation,
    processes,
    rendezvous,
    skips,
)

_MODULES = (
    *(processes, node_checks, rendezvous, islands, checkpoints, copies, data, skips, journals),
    *(planning, preparation, merging),
)
PARTS = {part.name: part for module in _MODULES for part in module.PARTS}
