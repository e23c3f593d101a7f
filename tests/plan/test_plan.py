"""`headrace plan`: what a run needs and takes, what binds it, what would help, and what several machines cost."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from pipeline.engines.parallel import fp8
from pipeline.engines.sizes.communicators import BYTES, PEER_BYTES, communicators
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.memory import peak_memory
from pipeline.plan import command_plan
from pipeline.plan.predict.memory_plan import host_fits
from pipeline.plan.predict.planned_run import PlannedRun, open_run
from pipeline.plan.search import machines
from pipeline.plan.search.machines import Offer, Question, compare, machines_of
from pipeline.plan.show import Report, as_json, lines, report_of
from pipeline.plan.stage_plans import planned_stages
from pipeline.runtime.machines.known import load_machine
from tests import warm
from tests.config.rules.test_layouts import shipped
from tests.conftest import ROOT, tiny_config, write_config
from tests.support import output_of


@cache
def planned(
    name: str, *overrides: str, machine: str = "h200", nodes: int | None = None, processes: int | None = None
) -> PlannedRun:
    path = str(ROOT / "ds_configs" / name)
    return open_run(path, overrides, load_machine(machine), nodes=nodes, processes=processes)


@cache
def report(name: str, *overrides: str, machine: str = "h200", processes: int | None = None) -> Report:
    return report_of(planned(name, *overrides, machine=machine, processes=processes), price=2.0, margin=0.05)


@pytest.mark.integration
@pytest.mark.parametrize("name", shipped())
def test_every_shipped_config_is_planned_without_its_data(name: str) -> None:
    found = report(name, processes=shipped()[name])
    plan = found.plan
    assert plan.memory.fits
    assert 0 < plan.step_s.low < plan.step_s.typical < plan.step_s.high
    assert 0 < plan.mfu.low < plan.mfu.high < 1
    split = sum(each.typical for each in plan.split.values())
    assert split == pytest.approx(plan.step_s.typical)
    assert plan.gpu_hours.typical == pytest.approx(plan.days.typical * 24 * found.planned.run.topology.world_size)
    text = "\n".join(lines(found))
    assert "bound by" in text
    assert json.loads(json.dumps(as_json(found)))["money"]["typical"] == pytest.approx(2 * plan.gpu_hours.typical)


OFFLOAD = (
    "zero_optimization.offload_optimizer.device=cpu",
    "zero_optimization.offload_param.device=cpu",
    "memory.activation_checkpointing=full",
    "train_micro_batch_size_per_gpu=1",
)


STAGED = {"stages/demo.json": (2, [716_800, 225_280, 163_840]), "stages/olmo3_7b.json": (256, [5.93e12, 1e11, 5e10])}
"""Shipped configs in stages: processes, and tokens of each stage, those of Olmo 3 as published."""


@pytest.mark.parametrize("name", STAGED)
def test_shipped_configs_in_stages_are_planned_with_the_tokens_of_each_stage(name: str) -> None:
    assert set(STAGED) == {f"stages/{path.name}" for path in (ROOT / "ds_configs/stages").iterdir()}
    processes, tokens = STAGED[name]
    found = planned_stages(planned(name, machine="h100", processes=processes))
    assert [each.plan.tokens for each in found] == pytest.approx(tokens, rel=1e-4)
    assert all(each.plan.memory.fits for each in found)


def test_each_stage_has_its_row_and_a_ramp_costs_what_its_tokens_cost() -> None:
    ramp = 'train_batch_size={"from": 16, "to": 64, "over_tokens": 1200000}'
    long = {"name": "long", "data": {"sequence_length": 1024}, "parallel": {"tp": 2}}
    stages = f"stages={json.dumps([{'name': 'stable', 'until': {'steps': 500}}, long])}"
    sets = ("train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=null", "run.steps=1000", "run.tokens=null")
    found = report("fsdp.json", ramp, stages, *sets, "scheduler=null", processes=2)
    stable, last = found.stages
    accounts = found.planned.run.accounts
    assert stable.plan.tokens + last.plan.tokens == accounts.tokens(1000)
    assert stable.plan.tokens < 500 * found.planned.run.batch.tokens
    seconds = stable.plan.step_s.typical * stable.plan.tokens / found.planned.run.batch.tokens
    assert stable.plan.days.typical * 86_400 == pytest.approx(seconds)
    assert last.plan.memory.peak.typical != stable.plan.memory.peak.typical
    said = "\n".join(lines(found))
    assert "stage stable  500 steps of up to" in said
    assert f"all stages  {accounts.tokens(1000):,} tokens" in said


def test_a_run_whose_host_is_too_small_does_not_fit_and_gets_more_nodes() -> None:
    """70B on one node: 20 bytes per parameter offloaded, the copy of a checkpoint, and a process for each rank."""
    found = report("llama_70b_zero3.json", *OFFLOAD, machine="h100", processes=8)
    node, parameters = (
        found.plan.memory.node,
        found.planned.costs.shares(found.planned.run).footprint.ranks[0].parameters,
    )
    assert node.memory["offload"] == pytest.approx(22 * parameters, rel=1e-3)
    assert node.memory["asynchronous checkpoints"] == pytest.approx(12 * parameters, rel=1e-3)
    assert node.memory["processes"] == 8 * 4e9
    assert found.plan.memory.peak.typical < found.plan.memory.device
    assert not found.plan.memory.fits
    text = "\n".join(lines(found))
    assert "of 2,000.0 GB, does not fit" in text
    assert "bound by  memory: its ranks need more than a node's host has" in text
    assert found.change is None
    nodes, sets = found.nodes
    assert nodes > 1
    proposed = planned(
        "llama_70b_zero3.json",
        *OFFLOAD,
        *(f"{key}={json.dumps(value)}" for key, value in sets.items()),
        machine="h100",
        nodes=nodes,
    )
    assert host_fits(proposed.run, proposed.costs, proposed.machine)
    assert as_json(found)["memory"]["node"]["memory_bytes"] == 2e12


def test_a_host_that_the_machine_does_not_know_is_said_and_not_checked() -> None:
    found = report("llama_70b_zero3.json", *OFFLOAD, machine="h100-pcie", processes=8)
    assert found.plan.memory.fits == (found.plan.memory.peak.typical <= found.plan.memory.device)
    assert "the machine's file does not give a node's memory" in "\n".join(lines(found))


def test_offload_to_nvme_takes_the_disks_time_and_room() -> None:
    common = ("engine=deepspeed", "zero_optimization.stage=3")
    cpu = report("llama_8b_8gpu.json", *common, *OFFLOAD[:2], processes=8)
    on_disk = [word.replace("=cpu", "=nvme") for word in OFFLOAD[:2]]
    paths = [word.replace("device=cpu", "nvme_path=/local") for word in OFFLOAD[:2]]
    nvme = report("llama_8b_8gpu.json", *common, *on_disk, *paths, processes=8)
    parameters = nvme.planned.costs.shares(nvme.planned.run).footprint.ranks[0].parameters
    assert nvme.plan.memory.node.disk == pytest.approx((12 + 4 + 2) * parameters, rel=1e-3)
    assert cpu.plan.memory.node.disk == 0
    assert nvme.plan.memory.node.memory["offload"] == pytest.approx(4 * parameters, rel=1e-3)  # sums of gradients
    # eight ranks with 4 buffers of a subgroup in fp32; of weights in bf16 5 buffers, and those that stay in memory
    for sub_group, elements in ((None, 1e9), (10**7, 1e7)):
        sets = () if sub_group is None else (f"zero_optimization.sub_group_size={sub_group}",)
        found = report("llama_8b_8gpu.json", *common, *on_disk, *paths, *sets, processes=8).plan.memory.node.memory
        expected = 8 * (4 * 4 * min(elements, parameters / 8) + 2 * 5 * 100e6 + 2 * min(1e9, parameters / 8))
        assert found["buffers of offload to NVMe"] == pytest.approx(expected, rel=1e-3)
    assert nvme.plan.memory.node.memory.keys() - cpu.plan.memory.node.memory.keys() == {"buffers of offload to NVMe"}
    # states and gradients are read and written once a step, by eight ranks from the same disks
    host = nvme.planned.machine.host
    least = 16 * parameters * (1 / host.disk_bytes_per_s[2] + 1 / (host.disk_write_bytes_per_s or [0])[2])
    assert nvme.plan.step_s.low - cpu.plan.step_s.low > least


def test_the_phases_of_memory_are_the_formulas_and_what_they_do_not_count() -> None:
    found = planned("llama_70b_fsdp_3d.json", processes=512)
    memory = report("llama_70b_fsdp_3d.json", processes=512).plan.memory
    footprint = footprint_of(found.run, found.costs.model)
    peaks = [peak_memory(found.run, footprint, pp_rank=rank).total for rank in range(4)]
    kinds = memory.phases[memory.phase]
    assert memory.pp_rank == peaks.index(max(peaks))
    rest = sum(kinds[kind] for kind in ("fragmentation", "context and NCCL", "communicators"))
    assert sum(kinds.values()) - rest == pytest.approx(max(peaks))
    assert kinds["communicators"] == communicators(found.run) * BYTES[1]
    assert memory.peak.typical == pytest.approx(sum(kinds.values()))
    assert memory.peak.low < max(peaks) < memory.peak.high


def test_communicators_of_gpus_take_memory_and_all_to_alls_more() -> None:
    ulysses = ("parallel.cp=4", "parallel.cp_method=ulysses", "data.sequence_length=8192")
    kinds = report("llama_8b_8gpu.json", *ulysses, processes=8).plan.memory.phases["loss"]
    assert kinds["communicators"] == BYTES[1] + 3 * PEER_BYTES[1]  # the cp ranks; the data ranks are all ranks
    assert "communicators" not in report("llama_8b_8gpu.json", processes=8).plan.memory.phases["loss"]
    assert "communicators 2.0 GB" in "\n".join(lines(report("llama_8b_8gpu.json", *ulysses, processes=8)))
    cpu = report("llama_8b_8gpu.json", *ulysses, machine="cpu", processes=8).plan.memory.phases["loss"]
    assert "communicators" not in cpu


def test_the_change_that_is_named_is_allowed_fits_and_is_faster() -> None:
    found = report("llama_70b_3d.json", processes=512)
    change = found.change
    assert change.step_s < found.plan.step_s.typical
    sets = [word for word in str(change).split() if word != "--set"]
    config = load_config(ROOT / "ds_configs" / "llama_70b_3d.json", [*sets, "launch.fallback_layouts=[]"])
    after = report("llama_70b_3d.json", *sets, "launch.fallback_layouts=[]", processes=512)
    assert resolve(config, world_size=512).topology == after.planned.run.topology
    assert after.plan.memory.fits
    assert after.plan.step_s.typical == pytest.approx(change.step_s)


def test_a_run_that_does_not_fit_is_bound_by_memory_and_told_a_change_that_fits() -> None:
    found = report("llama_8b_8gpu.json", "memory.activation_checkpointing=none", machine="l40s", processes=8)
    assert not found.plan.memory.fits
    assert found.plan.constraint == "memory"
    assert found.change.peak <= 0.95 * found.planned.machine.memory.bytes


@pytest.mark.integration
def test_a_model_that_fits_nowhere_is_told_the_fewest_nodes_that_hold_it() -> None:
    found = report("llama_70b_zero3.json", machine="rtx4090", processes=4)
    assert found.change is None
    nodes, sets = found.nodes
    # the memory of hosts (541 GB each) counts, too: by that of the devices alone one node would do
    assert nodes == 8
    overrides = [f"{key}={json.dumps(value)}" for key, value in sets.items()]
    there = report("llama_70b_zero3.json", *overrides, machine="rtx4090", processes=8 * nodes)
    assert there.plan.memory.fits


def test_a_calibrated_step_takes_longer_on_a_slower_machine() -> None:
    speeds = [
        report("llama_8b_8gpu.json", machine=name, processes=8).plan.tokens_per_s.typical
        for name in ("b200", "h200", "a100", "l40s")
    ]
    assert speeds == sorted(speeds, reverse=True)


def test_without_a_number_the_fewest_nodes_that_the_layout_takes_are_planned() -> None:
    assert planned("llama_8b_8gpu.json").run.topology.world_size == 8
    assert planned("llama_70b_fsdp_3d.json").run.topology.world_size == 32
    assert planned("llama_8b_8gpu.json", nodes=2).run.topology.world_size == 16


def test_a_plan_names_what_each_law_suggests_with_its_source() -> None:
    found = report("llama_8b_8gpu.json", processes=8)
    text = [line.strip() for line in lines(found)]
    after = text[next(place for place, line in enumerate(text) if line.startswith("intervals")) + 1 :]
    assert [line.split("  ")[0] for line in after] == [
        "batch size",
        "learning rate",
        "weight decay",
        "warm-up",
        "tokens",
    ]
    laws = as_json(found)["laws"]
    # 32 layers of 218,112,000 parameters and the final norm; embedding and head, of 525,336,576 each, do not count
    assert laws["parameters_non_embedding"] == 32 * 218_112_000 + 4096
    rates = {each["law"]: each["suggested"] for each in laws["suggestions"] if each["quantity"] == "learning_rate"}
    step_law = 1.79 * laws["parameters_non_embedding"] ** -0.713 * found.plan.tokens**0.307
    assert rates["Step Law"] == pytest.approx(step_law)
    assert all(each["source"] in "\n".join(after) for each in laws["suggestions"])
    assert "extrapolated" in after[1]  # Step Law was fitted up to 1B parameters
    assert laws["warnings"] == []


def test_a_plan_warns_of_a_learning_rate_far_from_all_laws() -> None:
    found = report("llama_8b_8gpu.json", "optimizer.params.lr=0.01", processes=8)
    warned = [line.strip() for line in lines(found) if line.strip().startswith("warning")]
    assert any("peak learning rate: 0.01" in line and "Step Law" in line for line in warned)
    assert as_json(found)["laws"]["warnings"] == [line.removeprefix("warning").strip() for line in warned]


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}},
        {"parametrization": "completep", "base": {"num_hidden_layers": 1}},
        {"path": True},
    ],
    ids=["another optimizer", "CompleteP", "a model that continues"],
)
def test_no_law_is_told_where_none_applies(change: dict[str, Any], tmp_path: Path) -> None:
    raw = tiny_config(tmp_path / "no-tokens", tmp_path / "run", engine="torch")
    assert as_json(_report_of(raw, tmp_path))["laws"] is not None
    if "optimizer" in change:
        raw |= change
    elif "path" in change:
        (tmp_path / "model").mkdir()
        model = {**raw["model"]["config"], "vocab_size": 128}
        (tmp_path / "model" / "config.json").write_text(json.dumps(model))
        raw["model"] = {"path": str(tmp_path / "model")}
        assert as_json(_report_of({**raw, "model": {**raw["model"], "fresh": True}}, tmp_path))["laws"] is not None
    else:
        raw["model"] |= change
    found = _report_of(raw, tmp_path)
    assert as_json(found)["laws"] is None
    assert [*lines(found)][-1].strip().startswith("intervals")


def _report_of(raw: dict[str, Any], directory: Path) -> Report:
    config = str(write_config(directory / "c.json", raw))
    return report_of(open_run(config, (), load_machine("h100"), nodes=None, processes=1))


def test_the_command_prints_a_plan_and_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    raw = tiny_config(tmp_path / "no-tokens", tmp_path / "run", engine="torch", bf16={"enabled": True})
    config = write_config(tmp_path / "c.json", raw)
    options = ("--config", config, "--machine", "h100", "--processes", "2", "--tokens", "1e6", "--price", "3", "--json")
    found = json.loads(output_of(warm.run("-m", "pipeline", "plan", *options)))
    assert found["tokens"] >= 1_000_000
    assert found["money"]["low"] < found["money"]["high"]
    assert any("ids are assumed" in note for note in found["notes"])
    broken = tmp_path / "machine.json"
    broken.write_text('{"name": "cut')
    for wrong, said in (
        (("--config", config, "--machine", "h10"), "did you mean 'h100'"),
        (("--machine", "h100"), "--config"),
        (("--config", config, "--machine", "h100", "--nodes", "0"), "--nodes"),
        (("--config", config, "--machine", "h100", "--tokens", "nan"), "not a finite number"),
        (("--config", config, "--machine", "h100", "--price", "inf"), "not a finite number"),
        (("--config", config, "--machine", broken), f"--machine = '{broken}'"),
        (("--config", config, "--machine", "h100", "--search", "--out", config), "is a file"),
        (("--config", config, "--machine", "h100", "--nodes", "1", "--processes", "2"), "--processes"),
    ):
        refused = warm.run("-m", "pipeline", "plan", *wrong, merged=True)
        assert refused.returncode == 2, wrong
        assert said in refused.stdout


def test_an_fp8_run_is_planned_without_torchao_but_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"bf16": {"enabled": True}, "fp8": {"enabled": True}, "compile": {"enabled": True}}
    raw = tiny_config(tmp_path / "no-tokens", tmp_path / "run", engine="torch", **sections)
    monkeypatch.setattr(fp8, "find_spec", lambda _name: True)
    assert not any("torchao" in note for note in _report_of(raw, tmp_path).planned.notes)
    monkeypatch.setattr(fp8, "find_spec", lambda _name: None)
    (note,) = (line for line in lines(_report_of(raw, tmp_path)) if "torchao" in line)
    said = "fp8 needs torchao, which is not installed here: pip install torchao."
    assert note == f"{'note':>14}  {said}"


def test_an_architecture_without_formulas_is_refused_with_what_knows_it(tmp_path: Path) -> None:
    raw = tiny_config(tmp_path / "no-tokens", tmp_path / "run", engine="torch")
    raw["model"] = {"config": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2}}
    config = str(write_config(tmp_path / "c.json", raw))
    with pytest.raises(ConfigError) as caught:
        open_run(config, (), load_machine("h100"), nodes=None, processes=1)
    assert "--exact" in caught.value.remedy


CONFIG = "llama_1b_zero3.json"
FREE = 0.05


@cache
def offers(
    *names: str, nodes: int | None = None, deadline: float | None = None
) -> tuple[list[Offer], dict[str, str], Question]:
    question = Question(nodes, deadline, FREE, {"h100": 2.5, "": 1.0})
    return *compare(planned(CONFIG, machine="h100"), names, question), question


def test_the_cheapest_machine_comes_first_and_every_layout_leaves_the_margin_free() -> None:
    found, without, question = offers("h100", "l40s", nodes=1)
    assert without == {}
    assert [each.cost for each in found] == sorted(each.cost for each in found)
    for each in found:
        assert each.plan.memory.peak.typical <= (1 - FREE) * load_machine(each.machine).memory.bytes
        hours = each.plan.gpu_hours.typical / each.failures.goodput
        assert each.cost == pytest.approx(hours * {"h100": 2.5}.get(each.machine, 1.0))
        assert each.run.batch.samples == planned(CONFIG, machine="h100").run.batch.samples
    table = "\n".join(machines.lines(planned(CONFIG, machine="h100"), found, without, question))
    assert table.index(found[0].machine) < table.index(found[1].machine)
    assert [each["machine"] for each in machines.as_json(found, without)["machines"]] == [
        each.machine for each in found
    ]


def test_a_deadline_takes_more_nodes_and_is_kept() -> None:
    (one,), _, _ = offers("h100", nodes=1)
    deadline = 0.4 * one.failures.days.high
    (found,), without, _ = offers("h100", deadline=deadline)
    assert without == {}
    assert found.failures.days.high <= deadline
    (fewer,), _, _ = offers("h100", nodes=found.nodes // 2)
    assert fewer.failures.days.high > deadline


@pytest.mark.integration
@pytest.mark.sweep
def test_what_is_never_in_time_or_fits_nowhere_is_named_with_the_reason() -> None:
    found, without, question = offers("h100", deadline=1e-4)
    assert found == []
    assert "the quickest takes" in without["h100"]
    large = planned("llama_70b_zero3.json", machine="h100", nodes=8)
    small = replace(question, nodes=1, deadline=None)
    found, without = compare(large, ["l4"], small)
    assert (found, without) == ([], {"l4": "1 nodes do not hold it"})


def test_all_are_the_gpus_that_are_known() -> None:
    found = machines_of("all")
    assert {"h100", "a100"} <= set(found)
    assert "cpu" not in found
    with pytest.raises(ConfigError, match="did you mean 'h200'"):
        machines_of("h100,h20")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--machine", "h100", "--deadline", "3"], "only when machines are compared"),
        (["--machine", "h100", "--price", "h100=2"], "prices by name are for several machines"),
        (["--machine", "all", "--search"], "--search is for one machine"),
        (["--machine", "all", "--deadline", "3", "--nodes", "2"], "give one of the two"),
        (["--machine", "all", "--price", "h100=cheap"], "not a finite number above 0"),
        (["--machine", "h100", "--memory-margin", "1"], "a share of a device's memory"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_torch_is_imported(options: list[str], said: str) -> None:
    parser = argparse.ArgumentParser()
    command_plan.add_arguments(parser)
    with pytest.raises(ConfigError, match=said):
        command_plan.run(parser.parse_args(["--config", "none.json", *options]))


def test_a_layout_of_the_config_that_does_not_fit_the_nodes_does_not_stop_a_search(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """405B on a number of nodes that its own pipeline does not take: the search replaces the layout anyway."""
    parser = argparse.ArgumentParser()
    command_plan.add_arguments(parser)
    config = str(ROOT / "ds_configs/llama_70b_fsdp_3d.json")
    words = ["--config", config, "--machine", "h100", "--nodes", "1"]
    with pytest.raises(ConfigError, match="pp 4"):
        command_plan.open_planned(parser.parse_args(words), [])
    overrides: list[str] = []
    planned = command_plan.open_planned(parser.parse_args([*words, "--search"]), overrides)
    assert str(planned.run.topology) == "dp 8"
    assert "parallel.pp=null" in overrides
    assert "own layout is refused" in planned.notes[-1]
    assert "own layout is refused" in capsys.readouterr().err
