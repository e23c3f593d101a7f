"""The answer of a plan: at most 15 lines, the same numbers as in its JSON, "yes" only if the upper end fits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pipeline.plan import check
from pipeline.plan.answer import MOST_LINES, NEAR_TIE, Answer, fits_text
from pipeline.plan.predict.interval import Interval
from pipeline.plan.predict.planned_run import open_run
from pipeline.plan.search.changes import Change
from pipeline.plan.show import Report, answer, as_json, report_of
from pipeline.run.before.summary import Entry
from pipeline.runtime.machines.known import load_machine
from tests.conftest import ROOT


@cache
def _report(name: str, *overrides: str, nodes: int | None = None) -> Report:
    path = str(ROOT / "ds_configs" / name)
    return report_of(open_run(path, overrides, load_machine("h100"), nodes=nodes), price=2.5)


def _row(of: Answer, label: str) -> str:
    [line] = [line for line in of.lines() if line.startswith(f"{label} ")]
    return line


@pytest.mark.parametrize("name", ["llama_8b_8gpu.json", "qwen3_moe_30b.json"])
def test_the_answer_has_at_most_fifteen_lines_and_the_numbers_of_the_json(name: str) -> None:
    report = _report(name)
    of, found = answer(report), as_json(report)
    text = of.lines()
    assert len(text) <= MOST_LINES
    assert [line.split()[0] for line in text[1:8]] == ["fits", "time", "cost", "limit", "change", "check", "trust"]
    assert f"{found['tokens_per_s']['typical']:,.0f} tokens/s" in _row(of, "time")
    assert f"{found['money']['typical']:,.0f} (" in _row(of, "cost")
    assert found["constraint"]["text"] in _row(of, "limit")
    for label in ("fits", "check", "trust"):
        assert _row(of, label).endswith(found["answer"][label])


def test_a_run_fits_only_if_the_upper_end_of_its_peak_does() -> None:
    memory = _report("llama_8b_8gpu.json").plan.memory
    for peak, says in ((0.7, "yes"), (0.95, "perhaps"), (1.2, "no")):
        ends = Interval(0.9 * peak * memory.device, peak * memory.device, 1.1 * peak * memory.device)
        assert fits_text(replace(memory, peak=ends)).startswith(f"{says}:")
    little = replace(memory.node, memory_bytes=1e9)
    assert fits_text(replace(memory, node=little)).startswith("no:")
    assert "which is too little" in fits_text(replace(memory, node=little))


@pytest.mark.parametrize(("gain", "tie"), [(NEAR_TIE / 2, True), (NEAR_TIE * 2, False)])
def test_a_change_under_the_error_of_plans_is_called_nearly_a_tie(gain: float, tie: bool) -> None:
    of = answer(_report("llama_8b_8gpu.json"))
    change = Change({"parallel.tp": 2}, 50e9, of.plan.step_s.typical / (1 + gain))
    assert ("nearly a tie" in _row(replace(of, change=change), "change")) == tie


def test_many_notes_are_cut_and_counted() -> None:
    of = answer(_report("llama_8b_8gpu.json"))
    many = replace(of, planned=replace(of.planned, notes=("a long note " * 40,) * 9))
    assert len(many.lines()) <= MOST_LINES
    assert max(map(len, many.lines()[8:])) < 180
    assert "6 more notes" in many.lines()[-1]


def _entries(*labels: str) -> list[Entry]:
    return [Entry(label, f"{label} {number} " + "word " * 60, number) for number, label in enumerate(labels)]


def test_the_answer_of_a_check_begins_with_what_would_run_and_has_whole_warnings() -> None:
    entries = _entries("differs", "tokenizer", "learning rate", "layout", "memory", "memory fit", "warnings")
    found = check.answer_lines(entries)
    labels = [line[:14].strip() for line in found]
    assert labels == ["layout", "memory", "memory fit", "learning rate", "differs", "warning", "--verbose"]
    assert max(map(len, found[:4])) <= 120
    assert found[5].endswith(entries[-1].text)
    assert found[-1].split("  ")[-1].startswith("1 more lines")


def test_the_answer_of_a_check_has_at_most_twenty_lines_and_counts_warnings_that_it_leaves_out() -> None:
    found = check.answer_lines(_entries("layout", "memory", "memory fit", *["data"] * 9, *["warnings"] * 15))
    assert len(found) == check.MOST_LINES
    assert sum(line.startswith("       warning") for line in found) == 11
    assert "4 of them warnings" in found[-1]
    assert "memory fit" in "".join(found)


@pytest.mark.parametrize(
    ("name", "nodes", "note"),
    [
        ("llama_8b_8gpu.json", 3, "8 padding rows a step: 64 samples do not divide over 24 ranks"),
        ("llama_70b_3d.json", 5, "8 ranks are idle: the layout takes 32"),
        ("llama_70b_3d.json", 4, "Not the config's layout: fallback layout 1 of 1"),
    ],
)
def test_nodes_that_the_layout_cannot_take_are_named_in_the_answer_and_the_json(
    name: str, nodes: int, note: str
) -> None:
    report = _report(name, nodes=nodes)
    assert any(line.startswith(f"note    {note}") for line in answer(report).lines())
    assert any(each.startswith(note) for each in as_json(report)["notes"])


def test_no_line_of_the_answer_is_longer_than_a_terminal() -> None:
    assert max(map(len, answer(_report("llama_8b_8gpu.json")).lines())) <= 105


@pytest.mark.parametrize(
    ("sets", "like"),
    [
        ((), "published runs, dense: median error 7%"),
        (("engine=deepspeed",), "no published run of this kind"),
        (("zero_optimization.stage=1",), "published runs, dense"),
    ],
)
def test_trust_says_whether_a_published_run_of_this_kind_was_compared(sets: tuple[str, ...], like: str) -> None:
    assert _row(answer(_report("llama_8b_8gpu.json", *sets)), "trust").startswith(f"trust   {like}")
