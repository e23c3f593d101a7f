"""Names of routers in model folders and in transformers, whose classes do not name every router. No torch."""

from __future__ import annotations

import re

_ROUTER = re.compile(r"(^|\.)(gate|router|router_gate|modality_router|shared_expert_gate)(\.\w+)*$")


def is_router(module: str) -> bool:
    """Whether a module chooses or weighs the experts of a token, or is part of a module that does.

    Args:
        module: dotted name, e.g. `model.layers.0.mlp.gate` (most), `mlp.gate.wg` (HunYuan), `ffn.router.layer` (DBRX),
            `mlp.router.classifier` (LongCat), `altup.modality_router` (Gemma 3n). A `gate_proj` is not a router.
    """
    return _ROUTER.search(module) is not None
