"""Modules of released versions that have moved: importing one, or `python -m` with it, names the new module.

Job scripts that users copied, and loops of their own, hold such names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "pipeline.anomalies": "pipeline.run.anomalies",
    "pipeline.arguments": "pipeline.runtime.launch.arguments",
    "pipeline.check": "pipeline.plan.check",
    "pipeline.comparison": "pipeline.evaluation.comparison",
    "pipeline.consumers": "pipeline.evaluation.consumers",
    "pipeline.coordinate_check": "headrace ladder --coordinate-check",
    "pipeline.distillation": "pipeline.run.distillation",
    "pipeline.elastic": "pipeline.cluster.elastic",
    "pipeline.failures": "pipeline.runtime.goodput.failures",
    "pipeline.fake_gpu": "pipeline.plan.fake_gpu",
    "pipeline.faults": "pipeline.runtime.faults",
    "pipeline.gguf_files": "pipeline.models.gguf",
    "pipeline.goodput": "pipeline.runtime.goodput",
    "pipeline.islands": "pipeline.run.groups.islands",
    "pipeline.ladder": "pipeline.plan.ladder",
    "pipeline.launch": "pipeline.runtime.launch",
    "pipeline.machines": "pipeline.runtime.machines",
    "pipeline.metrics": "pipeline.runtime.metrics",
    "pipeline.model_card": "pipeline.models.card",
    "pipeline.node_checks": "pipeline.cluster.node_checks",
    "pipeline.optim": "pipeline.engines.optim",
    "pipeline.parallel": "pipeline.engines.parallel",
    "pipeline.parametrization": "pipeline.engines.parametrization",
    "pipeline.planner": "pipeline.plan",
    "pipeline.proof": "pipeline.plan.proof",
    "pipeline.pruning": "pipeline.compress.pruning",
    "pipeline.recipe": "pipeline.compress.recipe",
    "pipeline.replicas": "pipeline.run.groups.replicas",
    "pipeline.report": "pipeline.evaluation.report",
    "pipeline.status": "pipeline.cluster.status",
    "pipeline.topology": "pipeline.config.topology",
}
"""Old package or module -> new one, or the command that runs it."""


def name_moved_modules() -> None:
    """Makes imports of old names fail with the new one. Every package of ours calls it; it takes effect once."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())


class _MovedFinder:
    """The last finder: it is asked only for what no other one has found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds nothing.

        Raises:
            ModuleNotFoundError: the module has moved. Without a `name`, or `from PACKAGE import MODULE` would hide it.
        """
        del path, target
        if new := MOVED.get(name):
            raise ModuleNotFoundError(f"{name} has moved to {new}")
        return None
