"""Measures the memory of a run by executing its step on the fake device, for `headrace check --exact`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from foundation.errors import ConfigError
from pipeline.plan.fake_gpu.case import EAGER, StepCase, run_cases
from pipeline.run.before.memory_summary import Executed, shown_bytes
from pipeline.run.before.summary import Entry


@dataclass(frozen=True)
class RunInputs:
    """The inputs from which another process can resolve a run again.

    Attributes:
        config: path of the config file.
        overrides: overrides of the config, as texts of `--set`.
        processes: world size.
        begun: whether the run is resumed.
        vocabulary: number of ids of the dataset's tokenizer.
        imbalance: rows of the fullest expert-parallel rank over the mean; None for the load that `expert_load` assumes.
    """

    config: str
    overrides: Sequence[str]
    processes: int
    begun: bool
    vocabulary: int
    imbalance: float | None = None


def execute(source: RunInputs, *, ranks: Sequence[int], pp: int, engine: str) -> Executed:
    """Executes a step as each rank of the pipeline in turn, and returns the rank that needs most memory.

    Progress is written to stderr. An interrupt ends the executing process.

    Args:
        source: inputs of the run, for the other process.
        ranks: pipeline ranks to execute.
        pp: number of pipeline ranks.
        engine: engine of the config.

    Raises:
        ConfigError: the step failed, or breaks a contract of CUDA (`contracts`); the message has its error.
    """
    found: list[Executed] = []
    for rank in ranks:
        of = f" of pipeline rank {rank} ({len(found) + 1} of {len(ranks)})" if pp > 1 else ""
        print(f"executing a step{of} on fake tensors ...", end="", file=sys.stderr, flush=True)
        result = _result_of(_case(source, rank, engine=engine))
        print(f" {result['seconds']:.0f} s", file=sys.stderr, flush=True)
        found.append(Executed(rank, result["report"], result["seconds"]))
    return max(found, key=lambda each: each.peak)


def step_entries(executed: Executed) -> Iterator[Entry]:
    """Summarizes the step: collectives, reads of the device by the host, FLOPs."""
    report = executed.report
    names = ("kind", "axes", "dtype", "count", "bytes")
    collectives = [dict(zip(names, row, strict=True)) for row in report["collectives"]]
    size = sum(row["bytes"] for row in collectives)
    reads = {name: sum(report[name].values()) for name in ("host_reads", "deferred_reads")}
    flops = report["flops"]
    work = f"{flops / 1e12:,.1f} TFLOP" if flops >= 1e12 else f"{flops / 1e9:,.1f} GFLOP"
    count = sum(row["count"] for row in collectives)
    waits, late = _times(reads["host_reads"]), _times(reads["deferred_reads"])
    text = (
        f"{work}; {count:,} collectives of {shown_bytes(size)}; the host waits for the device {waits},"
        f" and reads it a step late {late}"
    )
    values: dict[str, Any] = {name: report[name] for name in ("flops", "host_reads", "deferred_reads", "unpinned")}
    yield Entry("step", text, {**values, "collectives": collectives, "seconds_to_execute": executed.seconds})


def _result_of(case: StepCase) -> dict[str, Any]:
    try:
        [result] = run_cases([case])
        why = result.get("error")
    except RuntimeError as error:
        result, why = {}, str(error)
    if why is not None:
        print(file=sys.stderr)
        failed, remedy = "the step failed on the fake device", "leave it out; the formulas need no step"
        if "contract" in result:
            failed = "the step runs on a CPU and would go wrong on a GPU"
            remedy = "another layout, and report it: it is a fault of the engine or of a package, not of the config"
        raise ConfigError("--exact", True, why=f"{failed}: {why}", remedy=remedy)
    return result


def _case(source: RunInputs, rank: int, *, engine: str) -> StepCase:
    # DeepSpeed makes the optimizer's states in its first step; the reported peak is the last step's
    steps = 2 if engine == "deepspeed" else 1
    overrides = (*source.overrides, EAGER)
    return StepCase(
        source.config,
        source.processes,
        rank,
        source.vocabulary,
        overrides,
        steps,
        begun=source.begun,
        imbalance=source.imbalance,
    )


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count:,} times")
