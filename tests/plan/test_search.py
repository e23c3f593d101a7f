"""`headrace plan --search`: only what the rules allow, the fastest that fits, and a config that trains in it."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from pipeline.plan.predict.plan import typical_time
from pipeline.plan.predict.planned_run import PlannedRun, open_run
from pipeline.plan.predict.simulated_step import SIMULATED
from pipeline.plan.search.command_search import search_command
from pipeline.plan.search.layouts import layouts
from pipeline.plan.search.search import Search, allowed, evaluate, search
from pipeline.plan.search.search_page import Table, page
from pipeline.plan.search.verify import Verified, winner_of, write_config
from pipeline.runtime.machines.known import load_machine
from tests import warm
from tests.conftest import ROOT, tiny_config
from tests.conftest import write_config as write
from tests.html_pages import HOSTILE, assert_inert
from tests.support import output_of

CONFIG = str(ROOT / "ds_configs" / "fsdp_3d.json")
LAYERS = "model.config.num_hidden_layers=8"
NO_TOKENS = 'data.sources=[{"path": "no-tokens"}]'
"""The vocabulary is then the same whether the demo was run here or not."""


@cache
def searched() -> tuple[PlannedRun, Search]:
    planned = open_run(CONFIG, (), load_machine("h100"), nodes=None, processes=8)
    return planned, search(planned.run, planned.costs, planned.machine)


def options(**given: Any) -> argparse.Namespace:
    default = {"verify": 0, "memory_margin": 0.05, "price": None, "out": None, "config": CONFIG, "json": False}
    return argparse.Namespace(**default | given)


def test_every_layout_is_one_that_the_rules_allow_with_the_same_batch() -> None:
    planned, found = searched()
    assert found.looked_at == len(found.candidates) > 400
    assert found.refused
    for each in found.candidates[::25]:
        again = resolve(each.run.config, world_size=8)
        assert again.topology == each.run.topology
        assert again.batch.samples == planned.run.batch.samples
        assert not again.batch.padding_rows


def test_layouts_of_a_search_are_for_equal_devices_whatever_the_config_says_of_pipeline_ranks() -> None:
    sets = ("parallel.pp=2", "parallel.stage_speeds=[2,1]", "parallel.stage_memory_gb=[70,36]")
    planned = open_run(CONFIG, sets, load_machine("h100"), nodes=None, processes=8)
    of_ranks = ("parallel.stage_speeds", "parallel.stage_memory_gb")
    found = list(itertools.islice(layouts(planned.run, planned.machine), 50))
    assert all(each[key] is None for each in found for key in of_ranks)
    assert not any(
        key in each for each in itertools.islice(layouts(searched()[0].run, planned.machine), 50) for key in of_ranks
    )


def test_the_plan_takes_given_speeds_and_memory_of_pipeline_ranks() -> None:
    def layers(*sets: str) -> list[int]:
        pipeline = ("parallel.pp=2", "parallel.schedule=1f1b", "parallel.virtual_stages=null", LAYERS, NO_TOKENS)
        planned = open_run(CONFIG, (*pipeline, *sets), load_machine("h100"), nodes=None, processes=8)
        return [len(rank.layers) for rank in planned.costs.shares(planned.run).footprint.ranks]

    even, fast_last = layers(), layers("parallel.stage_speeds=[1,9]")
    assert (even, fast_last) == ([7, 1], [4, 4])  # the head costs as much as 38 layers of this small model
    with pytest.raises(ConfigError, match="the pipeline ranks hold at most"):
        layers("parallel.stage_memory_gb=[0.001,0.001]")


def test_engines_stages_axes_schedules_and_offload_are_all_looked_at() -> None:
    _, found = searched()
    configs = [each.run.config for each in found.candidates]
    assert {(c.engine, c.zero_optimization.stage) for c in configs} == {
        *(("torch", stage) for stage in range(4)),
        *(("deepspeed", stage) for stage in range(4)),
    }
    assert {each.run.topology.tp for each in found.candidates} > {1}
    assert {each.run.topology.pp for each in found.candidates} > {1, 2}
    assert {c.parallel.schedule for c in configs} == {"1f1b", "interleaved_1f1b", "zero_bubble"}
    assert {c.zero_optimization.offload_optimizer.device for c in configs} == {"none", "cpu"}
    assert {c.memory.activation_checkpointing for c in configs} == {"none", "selective", "full"}


def test_no_layout_that_fits_is_faster_and_smaller_than_one_of_the_front() -> None:
    _, found = searched()
    front = found.pareto()
    assert all(a.step_s <= b.step_s and a.peak > b.peak for a, b in pairwise(front))
    for each in found.fitting():
        assert any(point.step_s <= each.step_s and point.peak <= each.peak for point in front)


def test_the_winner_is_written_as_a_config_that_resolves_to_its_layout(tmp_path: Path) -> None:
    planned, found = searched()
    best = allowed(found.fitting(), planned.costs, count=12)
    winner = winner_of([Verified(each, None) for each in best], memory=planned.machine.memory.bytes)
    assert winner.candidate.step_s <= 1.01 * found.fitting()[0].step_s
    path = tmp_path / "best.json"
    write_config(winner.candidate, path, config=CONFIG, overrides=["run.steps=120"])
    config = load_config(path)
    run = resolve(config, world_size=8)
    assert run.layout == winner.candidate.run.layout
    assert run.batch == winner.candidate.run.batch
    assert run.steps == 120


def test_a_layout_whose_executed_step_does_not_fit_is_no_winner() -> None:
    planned, found = searched()
    first, second = allowed(found.fitting(), planned.costs, count=2)
    memory = planned.machine.memory.bytes
    winner = winner_of([Verified(first, memory + 1.0), Verified(second, memory - 1.0)], memory=memory)
    assert winner.candidate is second
    assert winner_of([Verified(first, memory + 1.0)], memory=memory) is None


def test_the_page_has_the_table_and_the_points() -> None:
    _, found = searched()
    text = page(found, Table(("layout", HOSTILE), [(HOSTILE, "1 GB")]), title=HOSTILE, facts=[(HOSTILE, HOSTILE)])
    assert_inert(text)
    assert "Pareto front" in text
    assert "<svg" in text


@pytest.mark.integration
def test_the_command_executes_the_best_steps_and_prove_accepts_the_winner(tmp_path: Path) -> None:
    raw = tiny_config(tmp_path / "no-tokens", tmp_path / "run", engine="torch", train_batch_size=8)
    config = write(tmp_path / "c.json", raw)
    options = ("--config", config, "--machine", "h100", "--processes", "2", "--search", "--verify", "2", "--json")
    found = json.loads(output_of(warm.run("-m", "pipeline", "plan", *options, "--out", tmp_path / "plan")))
    assert found["best"][0]["executed_peak"] == pytest.approx(found["best"][0]["peak"], rel=0.1)
    assert (tmp_path / "plan" / "search.html").exists()
    output_of(warm.run("-m", "pipeline", "prove", "--config", found["config"], "--steps", "4", merged=True))


def test_the_best_layouts_are_simulated_and_laws_warn_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned, _ = searched()
    out = str(tmp_path / "plan")
    arguments = options(out=out, json=True)
    assert search_command(planned, arguments, ()) == 0
    found = json.loads(capsys.readouterr().out)
    assert len([text for text in found["warnings"] if text.startswith("training tokens")]) == 1
    times = [each["step_s"] for each in found["best"]]
    assert times == sorted(times)
    best = load_config(found["config"])
    costs, machine = planned.costs, planned.machine
    run = resolve(best, world_size=8)
    shown = typical_time(run, costs, machine, model=SIMULATED).total
    assert found["winner"]["step_s"] == pytest.approx(shown)


@pytest.mark.integration
def test_a_budget_ends_the_execution_after_the_layout_that_would_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.plan.search.verify._PROCESSES", 1)
    monkeypatch.setattr("pipeline.plan.search.command_search._BUDGET_S", 0.01)
    raw = tiny_config(tmp_path / "no-tokens", tmp_path / "run", engine="torch", train_batch_size=64)
    config = str(write(tmp_path / "c.json", raw))
    planned = open_run(config, (), load_machine("h100"), nodes=None, processes=2)
    given = options(verify=None, price=2.0, out=str(tmp_path / "plan"), config=config)
    assert search_command(planned, given, ()) == 0
    said = capsys.readouterr()
    assert said.err.count("executed: ") == 1
    first, last = said.out.split("\n\n")[:2]
    assert first.count("not executed") == 12
    assert last.count("not executed") == 11
    assert "at 2 an hour" in said.out
    assert "peak by the formulas" not in said.out  # the best one was executed


def test_a_read_only_directory_is_refused_before_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr("pipeline.plan.search.command_search.search", None)  # not reached
    planned, _ = searched()
    for out, said in (("file/plan", "is a file"), ("locked/plan", "locked is not writable")):
        if out.startswith("locked"):  # as of a user other than root
            monkeypatch.setattr("os.access", lambda path, _mode: path != tmp_path / "locked")
        with pytest.raises(ConfigError, match=said):
            search_command(planned, options(out=str(tmp_path / out)), ())


@pytest.mark.integration
def test_a_model_for_which_nothing_fits_is_refused_with_the_number_of_nodes() -> None:
    planned = open_run(
        str(ROOT / "ds_configs/llama_70b_zero3.json"), (), load_machine("rtx4090"), nodes=None, processes=4
    )
    with pytest.raises(ConfigError) as caught:
        search_command(planned, options(), ())
    assert "--nodes" in caught.value.remedy


def test_ctrl_c_ends_a_search_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, whole = searched()
    first = list(itertools.islice(layouts(planned.run, planned.machine), 60))

    def interrupted(*_: Any, **__: Any) -> Iterator[Any]:
        yield from first
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.plan.search.search.layouts", interrupted)
    monkeypatch.setattr("pipeline.plan.search.search._FIRST_S", 0.0)
    reports: list[int] = []
    found = search(planned.run, planned.costs, planned.machine, on_progress=lambda count, _best: reports.append(count))
    assert whole.whole
    assert not found.whole
    assert found.looked_at + found.refused + found.larger == len(first)
    assert reports == [1]
    assert found.fitting()


def test_layouts_that_are_not_computed_fit_no_better() -> None:
    """Every layout that the bounds leave out is computed here; none of those fits."""
    planned = open_run(CONFIG, (), load_machine("rtx4090"), nodes=None, processes=8)
    memory = planned.machine.memory.model_copy(update={"bytes": 1.6e9})
    small = planned.machine.model_copy(update={"memory": memory})
    found = search(planned.run, planned.costs, small)
    all_of_them = [evaluate(planned.run, planned.costs, small, sets) for sets in layouts(planned.run, small)]
    assert found.larger > 20
    fitting = [each for each in all_of_them if each is not None and each.fits]
    in_fp8 = sum("fp8.enabled" in each.sets for each in found.fitting())
    assert len(fitting) == len(found.fitting()) - in_fp8


@pytest.mark.parametrize(("slower", "wins"), [(1.12, "ep"), (1.2, "none")])
def test_a_kind_with_published_runs_wins_within_the_error_of_plans(slower: float, wins: str) -> None:
    _, found = searched()
    torch_run = next(each for each in found.fitting() if each.run.config.engine == "torch")
    candidates = {
        name: replace(torch_run, run=replace(torch_run.run, topology=replace(torch_run.run.topology, ep=ep)), step_s=s)
        for name, ep, s in (("none", 1, 1.0), ("ep", 2, slower))
    }
    winner = winner_of([Verified(each, None) for each in candidates.values()], memory=1e12, experts=True)
    assert winner.candidate is candidates[wins]
