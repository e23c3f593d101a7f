"""Published training speeds against the planner's: its error for GPUs, without having one (docs/reference/planner.md).

    python -m benchmarks.planner_published [--rows] [--peaks]

It plans every run of `published_runs.json` in its published layout. For each kind of run it prints their number, the
errors of the typical speed, (predicted - published) / published, and how many published speeds are within the interval;
with `--rows` also every run. The ranges of `pipeline/runtime/machines/*.json` came from half of each publication's runs
(`fitted`), which say how wide a range is. The other runs were not used.

Runs of Megatron, NeMo and MaxText (`best`) are planned at the efficiency of the best published runs; other runs, e.g.
of FSDP2, at that of this project's engines. Differences of the published systems count as the planner's error: an H100
with 500 W and slower memory instead of 700 W, other kernels, an asynchronous tensor parallelism. MPT and GPT models are
approximated by Llamas with as many parameters, and Megatron's distributed optimizer by ZeRO stage 1. Where a
publication does not mention recomputation, none is assumed; `note` has other assumptions.

`--peaks` prints the published peaks of memory alone: SimuMax's are allocated, torchtitan's reserved (also blocks that
the allocator keeps). Every second peak of a kind is seen: its range over the formulas' tensors, 5 % wider at both ends,
is tested on the others. torchtitan's loss until 2024-12 has logits in fp32, their log-softmax and its gradient beside
the bf16 logits and theirs: 16 bytes a logit, ours 6.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks.harness import make_parser
from pipeline.engines.sizes.memory import phases
from pipeline.plan.predict.interval import Interval
from pipeline.plan.predict.memory_plan import FORMULA_ERROR
from pipeline.plan.predict.plan import make_plan
from pipeline.plan.predict.planned_run import open_run
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.runtime.machines.known import load_machine

_CONFIGS = Path(__file__).parent.parent / "ds_configs"
_RUNS = Path(__file__).with_name("published_runs.json")
LONG = 16_384
"""Tokens per sequence from which a run counts as long-context."""


@dataclass(frozen=True)
class PublishedRun:
    """A published speed in tokens/s per GPU, with its layout.

    Attributes:
        best: Whether the engine is planned at the efficiency of the best published runs.
        fitted: Whether the machine's ranges came from this run.
        peak: Published peak memory in GiB.
        note: Assumptions about the run.
    """

    source: str
    name: str
    machine: str
    ranks: int
    speed: float
    best: bool
    fitted: bool
    overrides: tuple[str, ...]
    config: str = "llama_8b_8gpu.json"
    peak: float | None = None
    note: str = ""

    @property
    def fp8(self) -> bool:
        """Whether its products are in fp8."""
        return "fp8.enabled=true" in self.overrides

    @property
    def experts(self) -> bool:
        """Whether it has expert parallelism; such runs were published with an even routing."""
        return any(each.startswith("parallel.ep=") for each in self.overrides)

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        given = [each.partition("=")[2] for each in self.overrides if each.startswith("data.sequence_length=")]
        return int(given[-1]) if given else 8192

    @property
    def kind(self) -> str:
        """Kind of run with which its error is counted."""
        engine = ("experts, " if self.experts else "") + ("best published" if self.best else "our engines")
        context = ", 16,384 tokens and more" if self.length >= LONG else ""
        return f"{engine}, {load_machine(self.machine).name}, {'fp8' if self.fp8 else 'bf16'}{context}"


@cache
def published() -> tuple[dict[str, str], tuple[PublishedRun, ...]]:
    """Reads publication -> address ("" without one), and the runs."""
    known = json.loads(_RUNS.read_text())
    runs = tuple(
        PublishedRun(**{**run, "overrides": (*known["models"][model], *run["overrides"])})
        for run in known["runs"]
        for model in (run.pop("model"),)
    )
    return known["sources"], runs


@dataclass(frozen=True)
class Predicted:
    """A plan of a published run: tokens/s per GPU, peak bytes, and whether the typical peak fits the machine."""

    speed: Interval
    peak: float
    fits: bool

    def holds(self, run: PublishedRun) -> bool:
        """Whether the published speed is within the interval."""
        return self.speed.low < run.speed < self.speed.high


@cache
def predicted(run: PublishedRun) -> Predicted:
    """The plan of a published run in its layout."""
    machine = load_machine(run.machine)
    if run.best:  # these engines have grouped products in fp8 on Blackwell
        machine = (machine.as_best_published() or machine).model_copy(update={"compute_capability": None})
    even = 1.0 if run.experts else None
    path = str(_CONFIGS / run.config)
    planned = open_run(path, run.overrides, machine, nodes=None, processes=run.ranks, imbalance=even)
    plan = make_plan(planned.run, planned.costs, planned.machine)
    speed = plan.tokens_per_s.map(lambda each: each / run.ranks)
    return Predicted(speed, plan.memory.peak.typical, plan.memory.fits)


def error(run: PublishedRun) -> float:
    """(Predicted - published) / published, for the typical value."""
    return predicted(run).speed.typical / run.speed - 1


def summary(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Lines of a table in Markdown: each kind of run, and all runs together."""
    yield "| runs of | number | median error | median of errors without sign | from | to | within the interval |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    kinds = sorted({run.kind for run in runs})
    for kind, of_kind in [*((kind, [run for run in runs if run.kind == kind]) for kind in kinds), ("all", [*runs])]:
        errors = [error(run) for run in of_kind]
        inside = sum(predicted(run).holds(run) for run in of_kind)
        yield (
            f"| {kind} | {len(of_kind)} | {median(errors):+.0%} | {median(map(abs, errors)):.0%} | {min(errors):+.0%}"
            f" | {max(errors):+.0%} | {inside} |"
        )


FP32_LOSS = 16 / 6
"""Bytes of a logit in torchtitan's loss over ours."""


def peak_kind(run: PublishedRun) -> str:
    """Kind of run with which a published peak is counted."""
    if run.source == "SimuMax":
        return "Megatron, allocated" + (", cp" if any("cp=" in each for each in run.overrides) else "")
    if any(each.startswith(("parallel.tp=", "parallel.pp=")) for each in run.overrides):
        return "torchtitan, reserved, tp and pp"
    return f"torchtitan, reserved, FSDP, {'full' if _recomputes(run) else 'selective'} checkpointing"


def _recomputes(run: PublishedRun) -> bool:
    return "memory.activation_checkpointing=full" in run.overrides


def tensors(run: PublishedRun) -> tuple[float, float]:
    """Bytes of tensors at the peak in GiB: of our engine, and with torchtitan's loss where layers are recomputed."""
    machine = load_machine(run.machine)
    planned = open_run(str(_CONFIGS / run.config), run.overrides, machine, nodes=None, processes=run.ranks)
    footprint = planned.costs.shares(planned.run).footprint
    moments = [
        each
        for rank in range(planned.run.topology.pp)
        for each in phases(planned.run, footprint, pp_rank=rank).values()
    ]
    more = FP32_LOSS - 1 if run.source != "SimuMax" and _recomputes(run) else 0.0
    ours, theirs = (max(each.total + share * each.logits for each in moments) for share in (0.0, more))
    return ours / 2**30, theirs / 2**30


def peaks(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Lines of a table in Markdown: published peaks over the formulas' tensors, by kind."""
    yield "| peaks of | rows | published / our tensors | with their loss | range of the seen half | unseen inside |"
    yield "|---|---:|---|---|---|---:|"
    for kind in sorted({peak_kind(run) for run in runs}):
        of_kind = [(run.peak or 0.0, *tensors(run)) for run in runs if peak_kind(run) == kind]
        ours, shares = ([each[0] / each[index] for each in of_kind] for index in (1, 2))
        low, high = min(shares[::2]) - FORMULA_ERROR, max(shares[::2]) + FORMULA_ERROR
        inside = sum(low <= each <= high for each in shares[1::2])
        yield (
            f"| {kind} | {len(of_kind)} | {min(ours):.2f} to {max(ours):.2f} | {min(shares):.2f} to {max(shares):.2f}"
            f" | {low:.2f} to {high:.2f} | {inside} of {len(shares[1::2])} |"
        )


def rows(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Lines of a table in Markdown: every run."""
    yield "| published by | run | GPUs | tokens/s per GPU | predicted | interval | error | in it | peak | predicted |"
    yield "|---|---|---|---:|---:|---:|---:|---|---:|---:|"
    for run in runs:
        plan, address = predicted(run), published()[0][run.source]
        low, typical, high = (f"{each:,.0f}" for each in (plan.speed.low, plan.speed.typical, plan.speed.high))
        source = f"[{run.source}]({address})" if address else run.source
        measured = "" if run.peak is None else shown_bytes(run.peak * 2**30)
        peak = shown_bytes(plan.peak) + ("" if plan.fits else ", too much")
        yield (
            f"| {source} | {run.name} | {run.ranks} x {load_machine(run.machine).name} | {run.speed:,.0f} | {typical}"
            f" | {low} to {high} | {error(run):+.0%} | {'yes' if plan.holds(run) else 'no'} | {measured} | {peak} |"
        )


def main() -> None:
    """Entry point."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", action="store_true", help="print every run, too")
    parser.add_argument("--peaks", action="store_true", help="print the published peaks of memory alone")
    options = parser.parse_args()
    if options.peaks:
        print(*peaks([run for run in published()[1] if run.peak is not None]), sep="\n")
        return
    for title, fitted in (("Ranges came from", True), ("Not used for the ranges", False)):
        runs = [run for run in published()[1] if run.fitted == fitted]
        print(f"{title}:\n", *summary(runs), "", sep="\n")
        if options.rows:
            print(*rows(runs), "", sep="\n")


if __name__ == "__main__":
    main()
