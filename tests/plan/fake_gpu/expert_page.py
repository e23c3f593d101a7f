"""The bound on MFU of mixtures of experts in `docs/performance.md`, by the planner's formulas at the peak rates.

python -m tests.plan.fake_gpu.expert_page
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from pipeline.engines.sizes.expert_load import expert_load
from pipeline.plan.imbalance import with_imbalance
from pipeline.plan.predict.communication import transfers
from pipeline.plan.predict.plan import run_rates, typical_time
from pipeline.plan.predict.planned_run import PlannedRun, open_run
from pipeline.plan.predict.rates import TYPICAL, Rates
from pipeline.plan.predict.simulated_step import SIMULATED
from pipeline.plan.predict.step_time import step_time, works_of
from pipeline.runtime.machines.machine import Machine
from tests.conftest import ROOT
from tests.plan.fake_gpu.cells import EXPERTS_GATHERED
from tests.plan.fake_gpu.links import MACHINES

PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- experts: made by python -m tests.plan.fake_gpu.expert_page -->", "<!-- end of experts -->"
QWEN, DEEPSEEK = ("qwen3_moe_30b.json", 64), ("deepseek_v3_671b.json", 2048)
ROWS = {
    "qwen3_moe_30b.json, experts gathered": (*QWEN, EXPERTS_GATHERED),
    "the same, micro-batch 8": (*QWEN, (*EXPERTS_GATHERED, "train_micro_batch_size_per_gpu=8")),
    "qwen3_moe_30b.json, as shipped": (*QWEN, ()),
    "the same, layers wait for the exchange": (*QWEN, ("parallel.ep_overlap=false",)),
    "deepseek_v3_671b.json, as shipped": (*DEEPSEEK, ()),
    "the same, dualpipev": (*DEEPSEEK, ("parallel.schedule=dualpipev",)),
    "the same, dualpipev, the exchange beside another micro-batch": (
        *DEEPSEEK,
        ("parallel.schedule=dualpipev", "parallel.ep_overlap=true"),
    ),
    "deepseek_v3_671b.json, ep 64": (*DEEPSEEK, ("parallel.ep=64",)),
}
"""Name -> config, ranks, what differs from it."""


def page(text: str) -> str:
    """The page with its table."""
    before, after = text.split(BEGIN, maxsplit=1)[0], text.split(END)[1]
    return before + "\n".join([BEGIN, "", *_lines(), "", END]) + after


def _lines() -> Iterator[str]:
    yield (
        "| config | layout | load | GPU | products, s | other kernels, s | exchange, s | bubble, s | NVLink, s |"
        " network, s | MFU, all communication hidden | as it runs | planned |"
    )
    yield "|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for name, (file, ranks, overrides) in ROWS.items():
        for gpu in ("H200", "B200"):
            of = planned(file, ranks, overrides, gpu)
            uneven = expert_load(of.run, of.costs.widths).factor > 1.05
            for load in (None, 1.0) if uneven else (None,):
                yield f"| {name} | {of.run.topology} | {_row(replace(of, run=with_imbalance(of.run, load)), gpu)} |"


@cache
def planned(file: str, ranks: int, overrides: tuple[str, ...], gpu: str) -> PlannedRun:
    return open_run(str(ROOT / "ds_configs" / file), overrides, MACHINES[gpu], nodes=None, processes=ranks)


def _row(of: PlannedRun, gpu: str) -> str:
    rates, works = at_peak(of), works_of(of.run, of.costs)
    least = step_time(of.run, works, rates, model=SIMULATED)
    computing = least.products + least.kernels + least.bubble + least.optimizer
    links = {True: 0.0, False: 0.0}
    for work in works:
        of_rank = dict.fromkeys(links, 0.0)
        for each in transfers(work.layout):
            of_rank[max(each.ranks) < rates.topology.devices_per_node] += SIMULATED.collective(each, rates)
        links = {within: max(seconds, of_rank[within]) for within, seconds in links.items()}
    model = of.costs.size.flops_per_token * of.run.batch.tokens / of.run.topology.world_size / peak(of.machine)
    hidden = model / max(computing, *links.values())
    typical = typical_time(of.run, of.costs, of.machine, model=SIMULATED)
    parts = (least.products, least.kernels, least.expert_parallel, least.bubble, links[True], links[False])
    load = expert_load(of.run, of.costs.widths).factor
    shares = (hidden, model / least.total, model / typical.total)
    seconds = " | ".join(f"{each:.3f}" if each else "-" for each in parts)
    return f"{load:.2f} | {gpu} | {seconds} | {' | '.join(f'{each:.1%}' for each in shares)}"


def peak(machine: Machine) -> float:
    return machine.peak_flops["bf16"]


def at_peak(of: PlannedRun) -> Rates:
    """All rates at the machine's peaks, and all communication beside kernels that the engine has there."""
    whole = of.machine.efficiency.model_copy(update=dict.fromkeys(("memory", "links", "overlap"), (1.0, 1.0, 1.0)))
    machine = of.machine.model_copy(update={"efficiency": whole})
    rates = run_rates(of.run, of.costs, machine, TYPICAL)
    return replace(rates, products=peak(machine), head=peak(machine), attention=peak(machine))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
