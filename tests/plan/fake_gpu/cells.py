"""The shipped configs as fake steps: every config at its real size and world, every stage of its pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.load import load_config
from pipeline.plan.fake_gpu import case
from pipeline.plan.fake_gpu.case import StepCase
from tests.config.rules.test_layouts import shipped
from tests.conftest import ROOT

MEASURED = Path(__file__).with_name("measured.json")
"""Cell -> its report as the last sweep saw it; `docs/reference/communication.md` is made from it."""

DEMO_VOCABULARY = 4096
"""Ids of the tokenizer that `make demo` trains; the others are those of Llama 3."""

FEW_SPARSE = (
    "model.config.num_hidden_layers=4",
    "train_batch_size=128",
    "zero_optimization.stage=3",
    "memory.activation_checkpointing=full",
    "parallel.ep_overlap=false",
)
EXPERTS_GATHERED = (
    "parallel.ep=null",
    "parallel.ep_overlap=false",
    "zero_optimization.stage=3",
    "memory.activation_checkpointing=full",
)
GATHERED = "qwen3_moe_30b.json, experts gathered"
GATING = {
    "one GPU": (
        "llama_8b_h200.json",
        0,
        ("model.config.num_hidden_layers=4", "train_batch_size=2", "train_micro_batch_size_per_gpu=1"),
    ),
    "small moments": (
        "llama_8b_h200.json",
        0,
        (
            "model.config.num_hidden_layers=8",
            "train_batch_size=2",
            "train_micro_batch_size_per_gpu=1",
            "optimizer.params.moments_dtype=bf16",
        ),
    ),
    "FSDP2": ("llama_8b_8gpu.json", 0, ("model.config.num_hidden_layers=4", "train_batch_size=16")),
    "tensor and pipeline parallelism": (
        "llama_70b_fsdp_3d.json",
        3,
        ("model.config.num_hidden_layers=16", "train_batch_size=64", "run.tokens=null", "run.steps=70000"),
    ),
    "context parallelism": ("llama_8b_64k_cp.json", 0, ("model.config.num_hidden_layers=4", "train_batch_size=2")),
    "ring attention": (
        "llama_8b_64k_cp.json",
        0,
        ("model.config.num_hidden_layers=4", "train_batch_size=2", "parallel.cp_method=ring"),
    ),
    "mixture of experts": ("qwen3_moe_30b.json", 0, (*FEW_SPARSE, "parallel.ep=null")),
    "expert parallelism": ("qwen3_moe_30b.json", 0, (*FEW_SPARSE, "parallel.ep=8")),
    "expert parallelism beside another micro-batch": (
        "qwen3_moe_30b.json",
        0,
        ("model.config.num_hidden_layers=8", "train_batch_size=256", "memory.activation_checkpointing=full"),
    ),
    "latent attention and shared experts": (
        "deepseek_v3_671b.json",
        0,
        (
            "parallel.pp=1",
            "model.config.num_hidden_layers=3",
            "model.config.first_k_dense_replace=1",
            "train_batch_size=2048",
            "memory.activation_checkpointing=none",
        ),
    ),
    "expert parallelism, selective": (
        "qwen3_moe_30b.json",
        0,
        (*FEW_SPARSE, "parallel.ep=64", "memory.activation_checkpointing=selective", "loss.chunk=256"),
    ),
}
"""Kind of layout -> a shipped config at its world and its widths, with fewer layers and micro-batches, and the rank of
its pipeline: small enough for CI."""


UNEVEN = {"expert parallelism, selective": 2.0}
"""Of these, rows of the fullest expert-parallel rank over the mean; of the others, and of shipped configs, 1."""


def gating_cases() -> dict[str, StepCase]:
    """Name -> case: one config of each kind."""
    worlds = shipped()
    return {
        # in their first step, pipeline stages tell each other shapes
        f"gate: {name}": StepCase(
            f"ds_configs/{file}",
            worlds[file],
            pp_rank=rank,
            overrides=overrides,
            steps=2 if rank else 1,
            imbalance=UNEVEN.get(name, 1.0),
        )
        for name, (file, rank, overrides) in GATING.items()
    }


VARIANTS = {
    "zero1.json, ZeRO stage 0": StepCase(
        "ds_configs/zero1.json",
        2,
        vocabulary=DEMO_VOCABULARY,
        overrides=("zero_optimization.stage=0",),
        steps=2,
    ),
    GATHERED: StepCase("ds_configs/qwen3_moe_30b.json", 64, overrides=EXPERTS_GATHERED, imbalance=1.0),
}
"""Name -> case of a layout that no shipped config has: DeepSpeed's optimizer with states on every rank, and a
mixture of experts without expert parallelism."""


def shipped_cases() -> dict[str, StepCase]:
    """Name -> case: one for each rank of the pipeline of every shipped config, and the variants."""
    cases = {name: case for file, processes in sorted(shipped().items()) for name, case in _stages(file, processes)}
    return cases | VARIANTS


def engine_of(case: StepCase) -> str:
    return case.resolved().config.engine


def measured() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    return found


def keep(name: str, report: dict[str, Any]) -> None:
    found = {**measured(), name: without_line_numbers(report)}
    MEASURED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def judged(name: str, result: dict[str, Any]) -> tuple[bool, str]:
    """Whether a step did what is committed, and figures or what is wrong. A cell without a committed report gets it."""
    if "error" in result:
        return False, result["error"]
    report, committed = result["report"], measured().get(name)
    if committed is None:
        keep(name, report)
    wrong = differences(report, committed or report)
    figures = f"peak {report['peak'] / 1e9:.2f} GB, {report['flops'] / 1e12:,.1f} TFLOP"
    return not wrong, "; ".join(wrong) or figures


def without_line_numbers(report: dict[str, Any]) -> dict[str, Any]:
    """A report whose lines are functions: it changes when a function reads the device more often, not when it moves."""
    merged: dict[str, dict[str, int]] = {key: {} for key in ("host_reads", "deferred_reads", "unpinned")}
    for key, counts in merged.items():
        for line, count in report.get(key, {}).items():
            where = re.sub(r":\d+ ", " ", line)
            counts[where] = counts.get(where, 0) + count
    return {**report, **merged}


def differences(report: dict[str, Any], committed: dict[str, Any]) -> list[str]:
    """What a step does that the committed table does not say, and the other way round."""
    found, told = without_line_numbers(report), without_line_numbers(committed)
    wrong = [
        f"{key}: {found[key]}, the table says {told[key]}"
        for key in ("collectives", "host_reads", "deferred_reads", "unpinned", "flops", "parameters")
        if found[key] != told[key]
    ]
    if abs(found["peak"] - told["peak"]) > 0.001 * told["peak"]:
        wrong.append(f"peak: {found['peak']:,} bytes, the table says {told['peak']:,}")
    return wrong


def run_cases(cases: Sequence[StepCase], *, timeout_s: float = 3600) -> list[dict[str, Any]]:
    """Runs cases whose configs are shipped ones in one new process; see `case.run_cases`."""
    return case.run_cases(cases, timeout_s=timeout_s, cwd=ROOT)


def _stages(file: str, processes: int) -> Iterator[tuple[str, StepCase]]:
    path = ROOT / "ds_configs" / file
    demo = "out/demo" in str(load_config(path).data.sources[0].path)
    vocabulary = DEMO_VOCABULARY if demo else StepCase.vocabulary
    run = StepCase(str(path), processes).resolved()
    count = run.topology.pp
    # DeepSpeed makes the moments in its first step, and stage 3 keeps weights by what it has seen there
    steps = 2 if run.config.engine == "deepspeed" else 1
    for rank in range(count):
        name = f"{file} pp {rank}" if count > 1 else file
        yield (
            name,
            StepCase(f"ds_configs/{file}", processes, rank, vocabulary=vocabulary, steps=steps, imbalance=1.0),
        )
