"""The planner's speed: a plan of every shipped config on its natural machine, and a thousand layouts by closed forms.

    python -m benchmarks.planner [--layouts 1000]

It prints, as JSON, the seconds of every plan (config, model on meta, formulas, what would help; without the imports,
which are listed separately), and how many layouts a search computes per second: in wall time, and in CPU time, which a
busy machine does not lengthen.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

from benchmarks.harness import Seconds, make_parser
from foundation.version import __version__

NATURAL = {
    "llama_8b_h200.json": ("h200", 1),
    "llama_8b_8gpu.json": ("h100", 8),
    "llama_8b_64k_cp.json": ("h100", 16),
    "llama_1b_zero3.json": ("h100", 8),
    "llama_70b_zero3.json": ("h100", 512),
    "llama_70b_3d.json": ("h100", 512),
    "llama_70b_fsdp_3d.json": ("h200", 512),
    "qwen3_moe_30b.json": ("h200", 64),
    "deepseek_v3_671b.json": ("h200", 2048),
    **{f"{name}.json": ("rtx4090", 2) for name in ("zero1", "zero2", "zero3", "fsdp", "offload")},
    **{f"{name}.json": ("rtx4090", 4) for name in ("tp", "pp")},
    **{f"{name}.json": ("rtx4090", 8) for name in ("3d", "fsdp_3d")},
}
"""Shipped config -> machine and ranks for which it is written; the toys are for any machine."""

SEARCHED = ("llama_8b_8gpu.json", "llama_70b_fsdp_3d.json")


def main() -> None:
    """Entry point."""
    parser = make_parser(__doc__)
    parser.add_argument("--layouts", type=int, default=1000, metavar="N", help="layouts to compute (default: 1000)")
    arguments = parser.parse_args()
    began = Seconds.now()
    import pipeline.plan.show  # noqa: F401, PLC0415  imports torch

    result: dict[str, Any] = {"headrace": __version__, "imports_s": Seconds.since(began).wall}
    result["plans"] = {name: _plan(name, *of) for name, of in NATURAL.items()}
    result["slowest_plan_s"] = max(each["seconds"] for each in result["plans"].values())
    result["searches"] = {name: _search(name, *NATURAL[name], count=arguments.layouts) for name in SEARCHED}
    print(json.dumps(result, indent=2))


def _open(name: str, machine: str, processes: int) -> Any:
    from pipeline.plan.predict.planned_run import open_run  # noqa: PLC0415
    from pipeline.runtime.machines.known import load_machine  # noqa: PLC0415

    return open_run(f"ds_configs/{name}", (), load_machine(machine), nodes=None, processes=processes)


def _plan(name: str, machine: str, processes: int) -> dict[str, Any]:
    from pipeline.plan.show import report_of  # noqa: PLC0415

    began = Seconds.now()
    planned = _open(name, machine, processes)
    plan = report_of(planned).plan
    return {
        "machine": machine,
        "ranks": processes,
        **_took(began),
        "fits": plan.memory.fits,
        "step_s": plan.step_s.plain(),
        "mfu": None if plan.mfu is None else plan.mfu.plain(),
    }


def _took(began: Seconds) -> dict[str, float]:
    taken = Seconds.since(began)
    return {"seconds": taken.wall, "process_seconds": taken.cpu}


def _search(name: str, machine: str, processes: int, *, count: int) -> dict[str, Any]:
    """Computes the first layouts that the rules allow, as the search does; a whole search has more."""
    from pipeline.plan.search.layouts import layouts  # noqa: PLC0415
    from pipeline.plan.search.search import evaluate  # noqa: PLC0415

    planned = _open(name, machine, processes)
    run, costs = planned.run, planned.costs
    began = Seconds.now()
    allowed = (
        sets for sets in layouts(run, planned.machine) if evaluate(run, costs, planned.machine, sets) is not None
    )
    done = sum(1 for _ in islice(allowed, count))
    return {"layouts": done, **_took(began)}


if __name__ == "__main__":
    main()
