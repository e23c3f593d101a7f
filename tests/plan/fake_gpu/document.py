"""Makes `docs/reference/communication.md` from the committed fake steps: `python -m tests.plan.fake_gpu.document`.

With names of cells as arguments, it runs their steps first and commits what they do to the table.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.common import model_dtype
from pipeline.engines.parallel.rank_model import Footprint
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.memory import Bytes, peak_memory
from pipeline.engines.sizes.traffic import PURPOSES, TrafficLayout
from pipeline.models.attention import attention_of
from pipeline.models.construction.meta import build_meta
from pipeline.models.hf_config import resolve_hf_config
from pipeline.models.routers import find_routers
from pipeline.plan.fake_gpu.case import StepCase
from tests.conftest import ROOT
from tests.plan.fake_gpu.cells import gating_cases, keep, measured, run_cases, shipped_cases

PAGE = ROOT / "docs" / "reference" / "communication.md"
H200_BYTES = 141e9
NOT_FITTING: dict[str, str] = {}
"""Configs whose peak is above an H200's memory today, and why."""
REASONS = {
    "weights": "the last layer is gathered again for its backward pass, which follows its forward pass",
    "gradients": "gradients are reduced in fp32",
    "tensor parallelism, gathers": "activation checkpointing repeats the gathers of the forward pass",
    "tensor parallelism, scatters": "activation checkpointing repeats the scatters of the forward pass",
    "tensor parallelism, sums": "gradients of norms are summed in fp32",
    "weights of experts": "the last layer is gathered again for its backward pass, as any other",
    "gradients of experts": "gradients are reduced in fp32",
    "expert parallelism": "activation checkpointing repeats the exchanges of the forward pass",
    "expert parallelism, sizes": "activation checkpointing repeats the exchanges of the forward pass",
    "context parallelism": "activation checkpointing repeats the exchanges of the forward pass",
    "context parallelism, gradients": "gradients of keys and values are summed in fp32",
    "tied weights": "gradients are reduced in fp32",
    "numbers of the step": "several all-reduces where one would do",
    "shapes of messages": "torch's stages tell each other the shapes, in the first step only",
}
"""Why a row is above 1.05 times its minimum."""
DEEPSPEED_REASONS = {
    "weights": "ZeRO-3 gathers for the forward pass, for its recomputation, and for the backward pass",
    "gradients": "reduced in fp32; stages 1 and 2 all-reduce them, and each rank keeps a part",
    "tensor parallelism, sums": "gradients of norms are summed whole, in fp32, after every micro-batch",
    "tied weights": "gradients are summed before they are sharded",
    "shapes of messages": "stages tell each other the shapes, in the first step only",
}
"""The same, of DeepSpeed."""
SLACK = 1.05


def built(case: StepCase) -> tuple[ResolvedRun, nn.Module]:
    run = case.resolved()
    tokenizer = {"vocab_size": case.vocabulary, "bos_id": 0, "eos_id": 1, "pad_id": None}
    length = run.config.data.sequence_length
    config = resolve_hf_config(run.config.model, tokenizer=tokenizer, sequence_length=length)
    return run, build_meta(config, dtype=model_dtype(run.config), attn_implementation=attention_of(run))


def facts(case: StepCase) -> tuple[TrafficLayout, Footprint]:
    run, model = built(case)
    footprint = footprint_of(run, model)
    assert footprint is not None
    routed = sum(2 * router.experts for router in find_routers(model))
    return TrafficLayout(run, footprint.ranks[case.pp_rank], footprint.widths, routed), footprint


def formula_peak(case: StepCase) -> Bytes:
    layout, footprint = facts(case)
    return peak_memory(layout.run, footprint, pp_rank=case.pp_rank)


def purpose_of(kind: str, axes: str, dtype: str, size: int) -> str:
    if axes == "edp" or (kind == "all_to_all" and axes != "cp"):
        return _of_experts(kind, dtype)
    if kind == "all_to_all" or (kind in ("send", "recv") and axes == "cp"):
        return (
            "context parallelism, gradients" if dtype == "float32" and kind != "all_to_all" else "context parallelism"
        )
    if kind in ("send", "recv"):
        return "shapes of messages" if dtype == "int32" else f"pipeline, {'sent' if kind == 'send' else 'received'}"
    if kind == "all_reduce" and (size <= 64 or dtype == "float64"):
        return "numbers of the step"
    if axes in ("tp", "pp") or "x tp" in axes:
        names = {"all_gather": "tensor parallelism, gathers", "reduce_scatter": "tensor parallelism, scatters"}
        return names.get(kind, "tied weights" if axes == "pp" else "tensor parallelism, sums")
    return "weights" if kind in ("all_gather", "broadcast") else "gradients"


def _of_experts(kind: str, dtype: str) -> str:
    if kind == "all_to_all":
        return "expert parallelism, sizes" if dtype == "int64" else "expert parallelism"
    return "weights of experts" if kind == "all_gather" else "gradients of experts"


def rows(case: StepCase, report: dict[str, Any]) -> Iterator[tuple[str, int, int, str, int]]:
    """(purpose and kind, count, bytes, dtype, least bytes) of every collective of a step."""
    layout, _ = facts(case)
    for kind, axes, dtype, count, size in report["collectives"]:
        purpose = purpose_of(kind, axes, dtype, size)
        least = PURPOSES[purpose](layout) if purpose in PURPOSES else 0
        yield f"{purpose}|{kind} over {axes}", count, size, dtype, least


def ratio_of(purpose: str, count: int, size: int, least: int) -> float:
    """How much above its minimum a row is; of tiny messages the number of them counts."""
    if purpose == "numbers of the step":
        return float(count)
    return size / least if least else float("inf")


def page() -> str:
    found, cases = measured(), shipped_cases()
    done = {name: case for name, case in cases.items() if name in found}
    lines = [_HEAD, *_reasons(done, found), "", "## Communication of a step", "", *_communication(done, found)]
    lines += ["## Peak memory", "", _MEMORY, "", *_memory(done, found)]
    lines += ["## What the host waits for", "", _HOST, "", *_host(done, found)]
    missing = [name for name in cases if name not in found]
    if missing:
        stages: dict[str, list[str]] = {}
        for name in missing:
            stages.setdefault(name.partition(" pp ")[0], []).append(name.partition(" pp ")[2])
        named = [f"- `{name}`: pp {', '.join(ranks)}" for name, ranks in stages.items()]
        lines += ["## Not executed", "", _MISSING, "", *named, ""]
    return "\n".join(lines)


def _reasons(cases: dict[str, StepCase], found: dict[str, Any]) -> Iterator[str]:
    """A line for every reason of a row that is not at its minimum, with the rows that it explains."""
    told: dict[str, dict[str, None]] = {}
    for name, case in cases.items():
        engine = "DeepSpeed" if case.resolved().config.engine == "deepspeed" else "torch"
        for label, count, size, _, least in rows(case, found[name]):
            purpose = label.split("|")[0]
            if reason := reason_of(case, purpose, ratio_of(purpose, count, size, least)):
                told.setdefault(reason, {})[f"{purpose} ({engine})"] = None
    for reason, purposes in told.items():
        line = f"- {', '.join(purposes)}: {reason}"
        yield textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False)


def _communication(cases: dict[str, StepCase], found: dict[str, Any]) -> Iterator[str]:
    for name, case in cases.items():
        report = found[name]
        if not report["collectives"]:
            continue
        layout = f"{report['layout']}; {case.processes} ranks."
        yield from (f"### {name}", "", textwrap.fill(layout, 120, break_on_hyphens=False), "")
        yield "| for | collective | count | bytes | dtype | ratio |"
        yield "|---|---|---:|---:|---|---:|"
        for label, count, size, dtype, least in rows(case, report):
            purpose, kind = label.split("|")
            ratio = ratio_of(purpose, count, size, least)
            shown = f"{ratio:.2f}" if least else "-"
            yield f"| {purpose} | {kind} | {count:,} | {size:,} | {dtype} | {shown} |"
        yield ""


def reason_of(case: StepCase, purpose: str, ratio: float) -> str:
    """Why a row is not at its minimum; empty where it is."""
    deepspeed = case.resolved().config.engine == "deepspeed"
    if deepspeed and ratio < 2 - SLACK and purpose == "weights":
        return "what was gathered stays between the passes, up to `stage3_max_live_parameters`"
    if ratio <= SLACK:
        return ""
    return (DEEPSPEED_REASONS if deepspeed else {}).get(purpose, REASONS[purpose])


def _memory(cases: dict[str, StepCase], found: dict[str, Any]) -> Iterator[str]:
    yield "| config | peak | weights | gradients | optimizer | activations | logits | formula | ratio | of 141 GB |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for name, case in cases.items():
        report, formula = found[name], formula_peak(case).total
        native = report["layout"].startswith("torch")
        kinds = " | ".join(_size(report["kinds"][kind]) if native else "-" for kind in _SHOWN)
        peak = report["peak"]
        ratio = f"{formula / peak:.2f} | {peak / H200_BYTES:.1%}"
        yield f"| {name} | {_size(peak)} | {kinds} | {_size(formula)} | {ratio} |"
    yield ""
    yield from (f"- `{name}` does not fit: {why}." for name, why in NOT_FITTING.items())
    yield ""


def _host(cases: dict[str, StepCase], found: dict[str, Any]) -> Iterator[str]:
    yield "| config | waits | deferred | pageable copies | where |"
    yield "|---|---:|---:|---:|---|"
    for name in cases:
        kinds = [found[name].get(key, {}) for key in ("host_reads", "deferred_reads", "unpinned")]
        lines = ((line.replace(" ", ":", 1), count) for counts in kinds for line, count in counts.items())
        where = "; ".join(f"`{line}` {count}" for line, count in lines)
        yield f"| {name} | {' | '.join(str(sum(counts.values())) for counts in kinds)} | {where} |"
    yield ""


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


_SHOWN = ("weights", "gradients", "optimizer", "activations", "logits")

_HEAD = """# Communication and memory of a step

This page shows what one training step of every shipped config sends and keeps, at its real size and number of ranks, on
one rank (the first of each pipeline stage). No GPU was used: the engines executed the steps on fake `cuda` tensors and
a fake process group, which have shapes, dtypes and lifetimes, but no values (`pipeline/plan/fake_gpu`);
`headrace check --exact` does the same for a config of yours. The page is made by
`python -m tests.plan.fake_gpu.document`, and a test compares it with the steps; `make sweep-gpu` executes all of them.

Bytes count the whole tensor: the output of an all-gather, the input of a reduce-scatter or an all-reduce, the rows of
an all-to-all. The minimum is a closed formula of the layout (`pipeline/engines/sizes/traffic.py`), with all tensors in
the dtype of forward and backward passes, and nothing sent twice. The ratio is bytes / minimum. Reasons for ratios more
than 5 % above 1:
"""
_MEMORY = """Bytes on the device at the largest moment of the step, by kind, beside the formulas that
`headrace check` prints (`pipeline/engines/sizes/memory.py`). They omit the allocator's fragmentation, the buffers of
NCCL and of kernels, and the CUDA context. For DeepSpeed only the total is shown: a flat buffer holds several kinds."""
_HOST = """The tables count reads of the device by the host in a step, by the function that makes them. The host stops
for "waits", and requests "deferred" reads after the next step has begun. Copies from memory that is not page-locked
follow. Reads in `pipeline/engines/torch_native/pipeline.py` occur in the first step only: the stages tell each other
shapes."""
_MISSING = """Later stages of DeepSpeed's pipeline receive the shapes of their input from the stage before, which is
not there: `AssertionError` in `deepspeed/runtime/pipe/engine.py`, `assert isinstance(self.pipe_recv_buf, tuple)`. The
first stage runs. `tests/engines/test_gpu.py` covers the rest on a machine with GPUs, and has not been run. The next
`make sweep-gpu` executes the listed stages of engine torch."""


def main() -> None:
    cases = {**gating_cases(), **shipped_cases()}
    for name in sys.argv[1:]:
        (result,) = run_cases([cases[name]])
        assert "report" in result, result["traceback"]
        keep(name, result["report"])
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
