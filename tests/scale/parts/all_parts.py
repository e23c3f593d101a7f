"""Every part, by name."""

from __future__ import annotations

from tests.scale.parts import checkpoints, data, journals, planning, preparation, processes, rendezvous

_MODULES = (processes, rendezvous, checkpoints, data, journals, planning, preparation)
PARTS = {part.name: part for module in _MODULES for part in module.PARTS}
