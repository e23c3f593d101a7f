"""A plan's memory: what the allocator reserves, what a margin costs, and checkpoints against a node's disks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.plan.predict.host_plan import kept_bytes
from pipeline.plan.predict.memory_plan import with_margin
from pipeline.plan.search.margin_cost import margin_cost
from pipeline.plan.search.search import search
from pipeline.plan.show import lines
from tests.config.rules.test_layouts import shipped
from tests.plan.test_plan import planned, report

_NO_TENSORS = ("fragmentation", "context and NCCL")
"""Kinds of memory beside those of tensors."""


@pytest.mark.parametrize(("name", "high"), [("llama_8b_8gpu.json", 1.15), ("llama_70b_fsdp_3d.json", 1.31)])
def test_the_upper_end_of_a_peak_has_room_for_what_the_allocator_reserves(name: str, high: float) -> None:
    found = report(name, processes=shipped()[name])
    memory = found.plan.memory
    kinds = memory.phases[memory.phase]
    held = sum(kinds.values()) - sum(kinds.get(kind, 0) for kind in (*_NO_TENSORS, "communicators"))
    assert memory.reserved is not None
    assert memory.reserved.high == pytest.approx(high * held)
    assert memory.peak.high >= memory.reserved.high + found.planned.machine.overhead.bytes[2]
    assert "torch's allocator reserves" in "\n".join(lines(found))


def test_other_engines_speed_is_said_to_be_of_a_layout_that_does_not_fit_ours() -> None:
    text = "\n".join(lines(report("llama_70b_zero3.json", machine="h100", processes=8)))
    assert "which does not fit our engines" in text
    assert "our engines" not in "\n".join(lines(report("llama_8b_8gpu.json", processes=8)))


def test_checkpoints_that_a_node_s_disks_cannot_hold_are_named() -> None:
    for keep, named in ((2, False), (400, True)):
        found = planned("llama_8b_8gpu.json", f"run.keep_checkpoints={keep}", machine="h100", processes=8)
        shares = found.costs.shares(found.run).footprint
        assert kept_bytes(found.run, shares) == pytest.approx((keep + 1) * 12 * found.costs.size.parameters, rel=1e-6)
        assert any("checkpoints that run.dir keeps" in note for note in found.notes) == named


def test_a_layout_that_only_the_margin_keeps_out_is_named_with_its_speed_and_margin() -> None:
    of = planned("llama_8b_8gpu.json", machine="h200", processes=1)
    small = replace(of, machine=with_margin(of.machine, 0.05))
    found = search(of.run, of.costs, small.machine)
    best, *_ = (each for each in found.fitting() if "fp8.enabled" not in each.sets)
    ((label, text),) = margin_cost(small, found, best, margin=0.05)
    assert (label, "torch, one device" in text) == ("margin", True)
    free = float(text.split()[-1])
    assert 0 < free < 0.05
    loose = replace(of, machine=with_margin(of.machine, free))
    wide = search(of.run, of.costs, loose.machine)
    better, *_ = (each for each in wide.fitting() if "fp8.enabled" not in each.sets)
    assert better.step_s < best.step_s
    assert not list(margin_cost(loose, wide, better, margin=free))
