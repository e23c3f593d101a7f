"""Published training speeds against the planner's: how wrong it is about GPUs, without one (docs/reference/planner.md).

    python -m benchmarks.planner_published

Plans every run of the two tables below in the layout that was published with it, and prints them in Markdown: tokens/s
per GPU published and predicted (typical and interval), the error of the typical value, (predicted - published) /
published, and the peak memory where it was published. Runs that ranges of `pipeline/runtime/machines/*.json` came from
are listed apart: they say how wide a range is, not how right.

What the published systems do otherwise counts as the planner's error: other kernels, other overlap, an H100 with 500 W
and slower memory in the place of 700 W. Approximated are MPT models as Llamas of the same width, depth and parameters
(their MLP has two matrices of 4 h, a Llama's three), and Megatron's distributed optimizer as ZeRO stage 2. Megatron
Bridge's tables do not say what is recomputed: assumed is nothing, with FSDP what the shipped config recomputes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from pipeline.plan.predict.interval import Interval
from pipeline.plan.predict.plan import make_plan
from pipeline.plan.predict.planned_run import open_run
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.runtime.machines.known import load_machine

_CONFIGS = Path(__file__).parent.parent / "ds_configs"

_TITAN = "https://github.com/pytorch/torchtitan/blob"
_FOUNDRY = "https://github.com/mosaicml/llm-foundry/blob/061f2c7ce64e655100286584a7629e2a09f827ba"
_BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/00b7660be0254ac6f95f44164ddd0c3e9cc798ed"
SOURCES = {
    "torchtitan": f"{_TITAN}/31a17bfdb70bab6f62a13d21816a5339b911d6e3/benchmarks/llama3_h100_202412_torchtitan.md",
    "torchtitan on H200": f"{_TITAN}/bcdeaa37c92d1eaceeec3351e7ac81be6a1488af/benchmarks/"
    "llama3_8b_h200_2025-06_torchtitan.md",
    "torchtitan on A100": f"{_TITAN}/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md",
    "LLM Foundry": f"{_FOUNDRY}/scripts/train/benchmarking/README.md",
    "Megatron Bridge": f"{_BRIDGE}/docs/performance-summary.md",
    "torchao": "",
    "OLMo-core": "",
    "NeMo Automodel": "",
}
"""Publication -> what was read on 2026-11-25; "" for one that docs/performance.md lists without an address."""


@dataclass(frozen=True)
class PublishedRun:
    """A published speed with its layout.

    Attributes:
        source: key of `SOURCES`.
        name: model and layout, for the table.
        machine: shipped machine.
        ranks: GPUs.
        speed: published tokens/s per GPU.
        overrides: of `config`, as of `--set`.
        config: a shipped one.
        peak: published peak memory in GiB.
    """

    source: str
    name: str
    machine: str
    ranks: int
    speed: float
    overrides: tuple[str, ...]
    config: str = "llama_8b_8gpu.json"
    peak: float | None = None


def _batch(samples: int, micro: int) -> tuple[str, ...]:
    return f"train_batch_size={samples}", f"train_micro_batch_size_per_gpu={micro}"


def _model(hidden: int, inner: int, layers: int, heads: int, key_value: int, *, vocabulary: int) -> tuple[str, ...]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": key_value}
    return tuple(f"model.config.{key}={value}" for key, value in sizes.items())


def _mpt(hidden: int, layers: int, heads: int) -> tuple[str, ...]:
    """An MPT model as a Llama of as many parameters; 2,048 tokens."""
    inner = 8 * hidden // 3 // 64 * 64
    sizes = _model(hidden, inner, layers, heads, heads, vocabulary=50368)
    return *sizes, "model.config.tie_word_embeddings=true", "data.sequence_length=2048"


def _checkpointing(mode: str) -> tuple[str, ...]:
    return (f"memory.activation_checkpointing={mode}",)


_FP8 = ("fp8.enabled=true",)
_EAGER = ("compile.enabled=false",)
_WHOLE = ("loss.chunk=null",)  # torchtitan computed the loss of all positions at once
_DDP = ("zero_optimization.stage=2",)
_70B = _model(8192, 28672, 80, 64, 8, vocabulary=128256)
_LLAMA2_13B = (*_model(5120, 13824, 40, 40, 40, vocabulary=32000), "data.sequence_length=4096")
_OLMO_7B = (*_model(4096, 11008, 32, 32, 32, vocabulary=100352), "data.sequence_length=4096")
_MPT_7B, _MPT_70B = _mpt(4096, 32, 32), _mpt(8192, 80, 64)

RANGES_FROM = (
    PublishedRun("torchtitan", "8B, FSDP 8, compiled", "h100", 8, 6_667, (*_batch(16, 2), *_WHOLE), peak=77.0),
    PublishedRun("torchtitan", "8B, FSDP 8, eager", "h100", 8, 5_762, (*_batch(16, 2), *_WHOLE, *_EAGER), peak=82.4),
    PublishedRun("torchao", "8B, FSDP 8", "h100", 8, 6_150, _batch(64, 1)),
    PublishedRun("OLMo-core", "7B, FSDP 8", "h100", 8, 9_700, (*_OLMO_7B, *_batch(128, 2))),
    PublishedRun("torchtitan", "8B, FSDP 8, fp8", "h100", 8, 8_532, (*_batch(16, 2), *_WHOLE, *_FP8), peak=76.8),
    PublishedRun("Megatron Bridge", "8B, FSDP 8, fp8", "h100", 8, 14_451, (*_batch(128, 1), *_FP8)),
    PublishedRun("torchtitan on A100", "8B, FSDP 64, eager", "a100", 64, 2_904, (*_batch(64, 1), *_WHOLE, *_EAGER)),
    PublishedRun(
        "LLM Foundry", "MPT 7B, FSDP 8", "a100", 8, 4_641, (*_MPT_7B, *_batch(96, 6), *_checkpointing("none"))
    ),
)
"""Runs that the ranges of the A100, the H100 and the H200 came from."""

_TITAN_70B = (*_70B, *_WHOLE, *_checkpointing("full"))
_FOUNDRY_70B = (*_MPT_70B, *_batch(2048, 8), *_checkpointing("full"))
_BRIDGE_8B = (*_batch(128, 2), *_FP8, *_DDP, *_checkpointing("none"))
_BRIDGE_70B = (
    *(*_70B, *_DDP, *_FP8, *_batch(128, 1), *_checkpointing("none")),
    *("parallel.tp=4", "parallel.pp=8", "parallel.virtual_stages=5", "parallel.schedule=interleaved_1f1b"),
)

NOT_USED = (
    PublishedRun("NeMo Automodel", "Qwen3-30B-A3B, FSDP 8", "h100", 8, 12_040, (), "qwen3_moe_30b.json"),
    PublishedRun("torchtitan", "8B, FSDP 128, compiled", "h100", 128, 6_514, (*_batch(256, 2), *_WHOLE), peak=62.0),
    PublishedRun(
        "torchtitan",
        "70B, FSDP 32 x tp 8, fp8, full checkpointing",
        *("h100", 256, 829, (*_TITAN_70B, *_batch(512, 16), *_FP8, "parallel.tp=8")),
        peak=71.9,
    ),
    PublishedRun("Megatron Bridge", "70B, pp 8 (5 virtual stages) x tp 4 x dp 2, fp8", "h100", 64, 1_602, _BRIDGE_70B),
    PublishedRun("LLM Foundry", "MPT 70B, FSDP 64, full checkpointing", "h100", 64, 1_039, _FOUNDRY_70B),
    PublishedRun(
        "torchtitan on H200",
        "8B, FSDP 32, fp8",
        *("h200", 32, 10_938, (*_batch(64, 2), *_WHOLE, *_FP8)),
        peak=47.96,
    ),
    PublishedRun(
        "torchtitan on A100",
        "70B, FSDP 64, full checkpointing, eager",
        *("a100", 64, 331, (*_TITAN_70B, *_batch(64, 1), *_EAGER)),
    ),
    PublishedRun("LLM Foundry", "MPT 70B, FSDP 64, full checkpointing", "a100", 64, 410, _FOUNDRY_70B),
    PublishedRun("Megatron Bridge", "8B, dp 8, fp8", "b200", 8, 30_624, _BRIDGE_8B),
    PublishedRun("Megatron Bridge", "8B, dp 8, fp8", "gb200", 8, 31_508, _BRIDGE_8B),
)
"""Runs that no range came from."""


@dataclass(frozen=True)
class Predicted:
    """A plan of a published run.

    Attributes:
        speed: tokens/s per GPU.
        peak: bytes.
        fits: whether the typical peak fits the machine.
    """

    speed: Interval
    peak: float
    fits: bool


@cache
def predicted(run: PublishedRun) -> Predicted:
    """The plan of a published run in its layout."""
    config = str(_CONFIGS / run.config)
    planned = open_run(config, run.overrides, load_machine(run.machine), nodes=None, processes=run.ranks)
    plan = make_plan(planned.run, planned.costs, planned.machine)
    speed = plan.tokens_per_s.map(lambda each: each / run.ranks)
    return Predicted(speed, plan.memory.peak.typical, plan.memory.fits)


def error(run: PublishedRun) -> float:
    """(Predicted - published) / published, of the typical value."""
    return predicted(run).speed.typical / run.speed - 1


def table(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Lines of a table in Markdown, and a line with the median error."""
    yield "| published by | run | GPUs | tokens/s per GPU | predicted | interval | error | in it | peak | predicted |"
    yield "|---|---|---|---:|---:|---:|---:|---|---:|---:|"
    for run in runs:
        plan = predicted(run)
        low, typical, high = (f"{each:,.0f}" for each in (plan.speed.low, plan.speed.typical, plan.speed.high))
        within = "yes" if plan.speed.low < run.speed < plan.speed.high else "no"
        address = SOURCES[run.source]
        source = f"[{run.source}]({address})" if address else run.source
        measured = "" if run.peak is None else shown_bytes(run.peak * 2**30)
        peak = shown_bytes(plan.peak) + ("" if plan.fits else ", too much")
        yield (
            f"| {source} | {run.name} | {run.ranks} x {load_machine(run.machine).name} | {run.speed:,.0f}"
            f" | {typical} | {low} to {high} | {error(run):+.0%} | {within} | {measured} | {peak} |"
        )
    errors = [error(run) for run in runs]
    inside = sum(predicted(run).speed.low < run.speed < predicted(run).speed.high for run in runs)
    yield ""
    yield (
        f"Median error {median(map(abs, errors)):.0%}, from {min(errors):+.0%} to {max(errors):+.0%};"
        f" {inside} of {len(runs)} within the interval."
    )


def main() -> None:
    """Entry point."""
    for title, runs in (("Ranges came from", RANGES_FROM), ("Not used for the ranges", NOT_USED)):
        print(f"{title}:\n", *table(runs), "", sep="\n")


if __name__ == "__main__":
    main()
