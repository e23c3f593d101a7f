"""Lowers the graphs of a case and builds their kernels; prints JSON. python -m tests.plan.fake_gpu.lower CASE"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from pipeline.plan.fake_gpu.step import run_compiled_step  # isort: skip  before anything that imports torch
from pipeline.plan.fake_gpu.case import StepCase
from tests.plan.fake_gpu.lowering import BACKEND, build_cubins, lowering

CAPABILITIES = (90, 100)
"""Hopper and Blackwell."""


def main() -> None:
    fields = json.loads(sys.argv[1])
    case = StepCase(**{**fields, "overrides": tuple(fields["overrides"])})
    compiled = ("compile.enabled=true", f"compile.backend={BACKEND}")
    with lowering() as graphs:
        run_compiled_step(replace(case, overrides=(*case.overrides, *compiled)))
    found: list[dict[str, Any]] = []
    for graph in graphs:
        cubins = {str(each): build_cubins(graph, capability=each) for each in CAPABILITIES}
        shared = max((size for made in cubins.values() for _, size in made.values()), default=0)
        shape = {"part": graph.part, "backward": graph.backward, "kernels": len(graph.kernels), "calls": graph.calls}
        built = {each: len(made) for each, made in cubins.items()}
        memory = {"fused_bytes": graph.fused_bytes, "products": graph.products, "shared_memory": shared}
        found.append({**shape, **memory, "cubins": built})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
