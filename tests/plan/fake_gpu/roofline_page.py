"""The section of `docs/performance.md` about what a GPU allows on paper, from the committed kernels and fake steps.

    python -m tests.plan.fake_gpu.roofline_page [ROW ...]

Named rows are lowered again first, "all" for all of them; rows without committed kernels always are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from pipeline.plan.fake_gpu.case import StepCase
from tests.conftest import ROOT
from tests.plan.fake_gpu.cells import measured
from tests.plan.fake_gpu.document import H200_BYTES, formula_peak
from tests.plan.fake_gpu.links import LINKS
from tests.plan.fake_gpu.roofline import GPUS, KEPT, Work, measure, model_flops, slowest, time_of
from tests.plan.fake_gpu.rows import ROWS

PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- roofline: made by python -m tests.plan.fake_gpu.roofline_page -->", "<!-- end of the roofline -->"


def kept() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(KEPT.read_text())
    return found


def page(text: str, graphs: dict[str, list[dict[str, Any]]]) -> str:
    before, after = text.split(BEGIN, maxsplit=1)[0], text.split(END)[1]
    work = {name: slowest(row, graphs[name]) for name, row in ROWS.items()}
    lines = [BEGIN, "", *_work(work), "", *_gpus(), "", *_times(work), "", END]
    return before + "\n".join(lines) + after


def _work(done: dict[str, tuple[StepCase, Work]]) -> Iterator[str]:
    yield (
        "| config | layout | tokens a step | TFLOP | kernels read and write | update reads and writes |"
        " sent in a node | between nodes | peak memory |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for name, (case, work) in done.items():
        row, run = ROWS[name], case.resolved()
        within, between = (sum(each.bytes for each in work.sent if each.within is place) for place in (True, False))
        sizes = [_size(each) for each in (work.kernel_bytes, work.held_bytes, within, between)]
        peak = max(_peak(name, each.pp_rank) for each in row.stages())
        memory = _size(peak) + ("" if peak <= H200_BYTES else ", too much for an H200")
        tokens, layout = run.batch.tokens, "1 GPU" if run.alone else str(run.topology)
        yield f"| {name} | {layout} | {tokens:,} | {work.flops / 1e12:,.0f} | {' | '.join(sizes)} | {memory} |"


def _peak(name: str, pp_rank: int) -> float:
    row = ROWS[name]
    report = measured().get(row.cell(pp_rank) or "")
    return report["peak"] if report else formula_peak(row.stages()[pp_rank]).total


def _gpus() -> Iterator[str]:
    yield "| GPU | bf16, TFLOP/s | memory, TB/s | NVLink, GB/s | network, GB/s |"
    yield "|---|---:|---:|---:|---:|"
    for gpu, (flops, bandwidth) in GPUS.items():
        links = " | ".join(f"{each / 1e9:.0f}" for each in LINKS[gpu])
        yield f"| {gpu} | {flops / 1e12:,.1f} | {bandwidth / 1e12:.2f} | {links} |"


def _times(done: dict[str, tuple[StepCase, Work]]) -> Iterator[str]:
    yield (
        "| config | GPU | products, s | other kernels, s | gradients, update, s | bubble, s | step, s | NVLink, s |"
        " network, s | MFU, 6N + 12Lhs | 6N + 6Lhs | 6N + 12Lhs, tp and cp exposed |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for name, (_, work) in done.items():
        full, half = (model_flops(name, halves=halves) for halves in (2, 1))
        for gpu, (flops, _) in GPUS.items():
            time = time_of(work, gpu)
            parts = [time.products, time.fused, time.optimizer, time.bubble, time.total, time.nvlink, time.network]
            seconds = " | ".join(f"{each:.3f}" if each else "-" for each in parts)
            bounds = [(full, time.total), (half, time.total), (full, time.total_exposed)]
            shares = " | ".join(f"{counted / flops / least:.1%}" for counted, least in bounds)
            yield f"| {name} | {gpu} | {seconds} | {shares} |"


def _size(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size else "-"


def main() -> None:
    """Lowers rows, keeps what was found, and writes the section of the page."""
    found = kept() if KEPT.exists() else {}
    for name in ROWS:
        if name in sys.argv[1:] or "all" in sys.argv[1:] or name not in found:
            found[name] = measure(name)
            KEPT.write_text(json.dumps({each: found[each] for each in ROWS if each in found}, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
