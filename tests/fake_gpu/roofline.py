"""The bound on MFU of compiled training steps: what matrix products and memory traffic allow, with nothing exposed.

    python -m tests.fake_gpu.roofline

The compiled kernels of a decoder layer and of the loss are those that Inductor makes for an H200
(`tests.fake_gpu.lowering`), with the bytes that they read and write, times the layers and micro-batches of the config.
A matrix product or attention takes the longer of FLOPs / peak and bytes / bandwidth, any other kernel bytes /
bandwidth. What runs outside of compiled graphs (the head's products, the optimizer) is counted by formula.
Communication is taken to be hidden.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.fake_gpu.case import Case
from pipeline.models.count import measure as size_of
from tests.config.test_layouts import shipped
from tests.conftest import ROOT
from tests.fake_gpu.cells import GATING
from tests.fake_gpu.document import built

KEPT = Path(__file__).with_name("lowered.json")
PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- roofline: made by python -m tests.fake_gpu.roofline -->", "<!-- end of the roofline -->"

GPUS = {"H100 SXM": (989.4e12, 3.35e12), "H200": (989.4e12, 4.8e12), "B200": (2250e12, 8.0e12)}
"""Dense bf16 FLOP/s and bytes/s, from NVIDIA's data sheets (B200: HGX B200, per GPU)."""

OPTIMIZER_BYTES = {True: 54, False: 32}
"""Bytes that an AdamW update reads and writes per parameter that a rank holds. fp32 states: weight, gradient and two
moments are read and written. One device in bf16 also joins and splits the master weights (8), widens the gradient (6)
and writes the result (8)."""
ACCUMULATION_BYTES = 10
"""Bytes per parameter and micro-batch where one device adds up several gradients: one in bf16 to a sum in fp32."""

ROWS = {
    "llama_8b_h200.json, as shipped": ("one GPU", ()),
    "llama_8b_h200.json, nothing recomputed": ("one GPU", ("memory.activation_checkpointing=none",)),
    "the same, 64k tokens a step": ("one GPU", ("memory.activation_checkpointing=none", "train_batch_size=16")),
    "llama_8b_8gpu.json, as shipped": ("FSDP2", ()),
    "llama_8b_64k_cp.json, as shipped": ("context parallelism", ()),
}
"""Row -> kind of layout in `GATING`, and what differs from the config."""


@dataclass(frozen=True)
class Time:
    """Seconds of a step on one GPU, the least possible.

    Attributes:
        products: matrix products and attention.
        fused: the other compiled kernels.
        optimizer: its update, and the addition of gradients.
    """

    products: float
    fused: float
    optimizer: float

    @property
    def total(self) -> float:
        """Of the step."""
        return self.products + self.fused + self.optimizer


def cases() -> dict[str, Case]:
    """Row -> a step with two layers and one micro-batch."""
    found = {}
    for row, (kind, overrides) in ROWS.items():
        file, rank, _ = GATING[kind]
        processes = shipped()[file]
        run = Case(f"ds_configs/{file}", processes).resolved()
        small = ("model.config.num_hidden_layers=2", f"train_batch_size={run.batch.samples // run.batch.accumulation}")
        found[row] = Case(f"ds_configs/{file}", processes, pp_rank=rank, overrides=(*overrides, *small))
    return found


def measure(case: Case) -> list[dict[str, Any]]:
    """The graphs of a case, lowered in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fake_gpu.lower", json.dumps(vars(case))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def least_time(row: str, graphs: list[dict[str, Any]], *, flops: float, bandwidth: float) -> Time:
    """The least time of a step of a row's config on a GPU with such a peak and bandwidth."""
    (run, model), (small, _) = built(whole(row)), built(cases()[row])
    config: Any = model.config
    layers = config.num_hidden_layers / small.config.model.config["num_hidden_layers"]  # type: ignore[index]
    micro_batches = run.batch.accumulation
    products = fused = 0.0
    for graph in graphs:
        times = graph["calls"] * micro_batches * (layers if graph["products"] else 1.0)  # the loss has no products
        products += times * sum(max(f / flops, size / bandwidth) for f, size in graph["products"])
        fused += times * graph["fused_bytes"] / bandwidth
    tokens = run.batch.micro * run.batch.sequence_length // run.topology.cp
    products += micro_batches * 3 * 2 * tokens * config.vocab_size * config.hidden_size / flops
    size = size_of(model, config, sequence_length=run.batch.sequence_length)
    held = size.parameters / (1 if run.alone else run.topology.dp * run.topology.cp)
    added = ACCUMULATION_BYTES * micro_batches if run.alone and micro_batches > 1 else 0
    return Time(products, fused, (OPTIMIZER_BYTES[run.alone] + added) * held / bandwidth)


def model_flops(row: str, *, halves: int) -> float:
    """FLOPs of a step per rank: 6N + 12Lhs per token, as the training loop counts them, or with one half 6N + 6Lhs."""
    run, model = built(whole(row))
    config: Any = model.config
    length = run.batch.sequence_length * halves // 2  # it enters the attention alone
    per_token = size_of(model, config, sequence_length=length).flops_per_token
    assert per_token is not None
    return per_token * run.batch.tokens / run.topology.world_size


@cache
def whole(row: str) -> Case:
    """The config of a row at its real size."""
    case = cases()[row]
    return Case(case.config, case.processes, pp_rank=case.pp_rank, overrides=ROWS[row][1])


def table(kept: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The section of the page."""
    lines = [
        "| config | GPU | products, s | other kernels, s | gradients, update, s | step, s |"
        " MFU, 6N + 12Lhs | 6N + 6Lhs |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row, graphs in kept.items():
        counted = [model_flops(row, halves=halves) for halves in (2, 1)]
        for gpu, (flops, bandwidth) in GPUS.items():
            time = least_time(row, graphs, flops=flops, bandwidth=bandwidth)
            parts = " | ".join(f"{each:.3f}" for each in (time.products, time.fused, time.optimizer, time.total))
            shares = " | ".join(f"{each / flops / time.total:.1%}" for each in counted)
            lines.append(f"| {row} | {gpu} | {parts} | {shares} |")
    return lines


def page(text: str, kept: dict[str, list[dict[str, Any]]]) -> str:
    """The page with its section replaced."""
    before, after = text.split(BEGIN, maxsplit=1)[0], text.split(END)[1]
    return "\n".join([before + BEGIN, "", *table(kept), "", END]) + after


def main() -> None:
    """Lowers all rows, keeps what was found, and writes the section of the page."""
    kept = {row: measure(case) for row, case in cases().items()}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), kept))


if __name__ == "__main__":
    main()
