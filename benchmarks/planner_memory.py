"""Bytes of tensors of a step on the CPU, against the planner's formulas: a table of docs/reference/planner.md.

    python -m benchmarks.planner_memory [--precision bf16] [--only torch] [--bucket 200000]

Layouts, model and batch are those of benchmarks/parity.py. Every rank trains two real steps with gloo, under a mode
that follows each storage from the operator that returns it until it is freed. The peak of the second step counts, on
the rank that needs most. Beside it are the closed formulas of `headrace plan` and its search, and the same step on fake
tensors, with which `plan --search` verifies its best layouts. Sizes are rounded up to 512 bytes each, as CUDA's
allocator does. It takes some minutes on two cores.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import make_parser, print_head, print_row, work_folder
from benchmarks.parity import LAYOUTS, base
from foundation.configfile import merge
from foundation.section import parse
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config
from pipeline.engines.sizes.memory import TABLES, peak_memory
from pipeline.plan.fake_gpu import case as fake
from pipeline.plan.fake_gpu.memory import Memory
from pipeline.plan.predict.planned_run import planned_run
from pipeline.plan.proof.case import Case, CaseResult
from pipeline.plan.proof.shrunk_run import with_precision
from pipeline.plan.proof.tokens import write_tokens
from pipeline.plan.proof.worker import run_cases
from pipeline.runtime.machines.known import load_machine

VOCABULARY = 1024
STEPS = 2
"""Number of steps: the first makes optimizer states; the second is like all later ones."""


class TensorBytes(TorchDispatchMode):
    """Follows the storages of the CPU that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory({}, head=(0, 0))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its local operators are seen one by one
        result = op(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.device.type == "cpu" and not isinstance(each, DTensor):
                self.memory.see(each)
        return result


@contextmanager
def counted() -> Iterator[None]:
    """Makes ranks forked within the block count: each writes the peaks of its steps beside its case's result."""
    rank: Any = import_module("pipeline.plan.proof.rank")  # imports a rank's libraries
    build = rank.build_engine

    def build_counted(run: ResolvedRun, *args: Any, **kwargs: Any) -> Any:
        counter, peaks = TensorBytes(), []
        with counter, counter.memory.following_resizes():
            engine = build(run, *args, **kwargs)
        step = engine.train_step
        number = dist.get_rank() if dist.is_initialized() else 0
        path = Path(run.config.run.dir).parent / f"peaks-{number}.json"

        def train_step(*args: Any, **kwargs: Any) -> Any:
            counter.memory.begin()
            with counter, counter.memory.following_resizes():
                result = step(*args, **kwargs)
            peaks.append(counter.memory.peak().bytes)
            path.write_text(json.dumps(peaks))
            return result

        engine.train_step = train_step
        return engine

    rank.build_engine = build_counted
    try:
        yield
    finally:
        rank.build_engine = build


def layouts(tokens: Path, precision: str, only: str, *, bucket: int | None) -> dict[str, tuple[str, Case]]:
    """Name -> (engine, case); one process of each engine comes first."""
    shared = base(tokens, STEPS)
    alone = [("one process", 1, "torch", {}), ("one process", 1, "deepspeed", {"zero_optimization": {"stage": 1}})]
    found = {}
    for name, ranks, engine, fields in [*alone, *LAYOUTS]:
        if only in f"{engine}, {name}":
            config = with_precision(merge(shared, {"engine": engine, **fields}), precision)
            if bucket is not None and config.get("zero_optimization", {}).get("stage") and engine == "deepspeed":
                config["zero_optimization"] = {**config["zero_optimization"], "reduce_bucket_size": bucket}
            label = f"{engine}, {name}"
            found[label] = engine, Case(label.replace("/", " "), config, ranks, save=())
    return found


def measured_peaks(case: Case, result: CaseResult) -> list[int]:
    """Reads the bytes of the second step, by rank."""
    files = [result.directory / f"peaks-{rank}.json" for rank in range(case.processes)]
    return [json.loads(file.read_text())[-1] for file in files]


def executed_peaks(cases: list[Case], work: Path) -> list[dict[int, int]]:
    """Pipeline rank -> bytes of a step on fake tensors; ranks that cannot be executed are left out."""
    asked: list[tuple[int, int, fake.StepCase]] = []
    for number, case in enumerate(cases):
        path = work / f"{number}.json"
        path.write_text(json.dumps(case.config))
        run = resolved(case)
        stages = range(run.topology.pp if run.config.engine == "torch" else 1)
        asked += [
            (number, at, fake.StepCase(str(path), case.processes, at, VOCABULARY, (), STEPS, cpu=True)) for at in stages
        ]
    results = fake.run_cases([each for _, _, each in asked])
    found: list[dict[int, int]] = [{} for _ in cases]
    for (number, pp_rank, _), result in zip(asked, results, strict=True):
        if "report" in result:
            found[number][pp_rank] = result["report"]["peak"] + TABLES
        else:
            print(f"{cases[number].name}: {result['error']}", flush=True)
    return found


def resolved(case: Case) -> ResolvedRun:
    """Resolves the run of a case."""
    return resolve(parse(Config, case.config), world_size=case.processes)


def main() -> None:
    """Prints the table in Markdown."""
    parser = make_parser(__doc__)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--only", default="", metavar="TEXT", help="layouts whose engine or name has this text")
    text = "DeepSpeed's reduce_bucket_size in elements; without it its default, 5e8, which is larger than the model"
    parser.add_argument("--bucket", type=int, metavar="N", help=text)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with work_folder() as work:
        tokens = write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=60_000, longest=200)
        found = layouts(tokens, arguments.precision, arguments.only, bucket=arguments.bucket)
        cases = [case for _, case in found.values()]
        with counted():
            results = run_cases(cases, work / "runs")
        table(found, results, executed_peaks(cases, work))


def table(found: dict[str, tuple[str, Case]], results: dict[str, CaseResult], executed: list[dict[int, int]]) -> None:
    """One row per layout."""
    print_head("engine", "layout", "ranks", "measured, MB", "closed formulas", "step on fake tensors")
    machine = load_machine("cpu")
    errors: dict[str, list[float]] = {"closed": [], "executed": []}
    for (label, (engine, case)), fakes in zip(found.items(), executed, strict=True):
        result = results[case.name]
        name = label.removeprefix(f"{engine}, ")
        if result.error is not None:
            print_row(engine, name, case.processes, f"failed: {result.error.splitlines()[-1]}", "", "")
            continue
        run, peaks = resolved(case), measured_peaks(case, result)
        rank = max(range(case.processes), key=peaks.__getitem__)
        stage = run.topology.coordinates(rank)["pp"]
        planned = planned_run(run, machine, vocabulary=VOCABULARY)
        closed = peak_memory(planned.run, planned.costs.shares(planned.run).footprint, pp_rank=stage, cpu=True).total
        errors["closed"].append(closed / peaks[rank] - 1)
        cell = "not executed"
        if stage in fakes:
            errors["executed"].append(fakes[stage] / peaks[rank] - 1)
            cell = f"{errors['executed'][-1]:+.2%}"
        print_row(engine, name, case.processes, f"{peaks[rank] / 1e6:.2f}", f"{errors['closed'][-1]:+.1%}", cell)
    for name, values in errors.items():
        if values:
            sizes = sorted(map(abs, values))
            within = sum(each <= 0.01 for each in sizes)
            middle = statistics.median(sizes)
            print(f"\n{name}: median error {middle:.2%}, worst {sizes[-1]:.1%}, {within} of {len(sizes)} within 1 %")


if __name__ == "__main__":
    main()
