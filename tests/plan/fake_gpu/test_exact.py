"""`headrace check --exact` executes the step of a config, and says before it starts where it cannot."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from foundation.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.plan.fake_gpu import guard
from pipeline.plan.fake_gpu.case import StepCase, case_process
from pipeline.plan.fake_gpu.requirements import check_exact
from pipeline.run.before.memory_summary import Executed, memory_entries
from tests import warm
from tests.conftest import ROOT, tiny_config, write_config
from tests.plan.fake_gpu.cells import DEMO_VOCABULARY, measured, shipped_cases, without_line_numbers
from tests.plan.fake_gpu.document import built, formula_peak
from tests.support import output_of

NEEDS_DEVICE = pytest.mark.skipif(guard.missing() is not None, reason=guard.missing() or "")


def tiny_run(tmp_path: Path, **sections: Any) -> ResolvedRun:
    config = tiny_config(tmp_path / "tokens", tmp_path / "run", **sections)
    return resolve(load_config(write_config(tmp_path / "c.json", config), []), world_size=1)


@NEEDS_DEVICE
@pytest.mark.integration
def test_the_step_of_a_shipped_config_is_that_of_the_committed_table_beside_the_formulas(tokens: Path) -> None:
    source = json.dumps([{"path": str(tokens)}])
    sets = ("--set", f"data.sources={source}", "--set", f"model.config.vocab_size={DEMO_VOCABULARY}")
    config = ROOT / "ds_configs/fsdp.json"
    options = ("check", "--config", config, "--processes", "2", "--exact", "--memory", "1GB", "--json", *sets)
    done = warm.run("-m", "pipeline", *options)
    assert done.returncode == 0, done.stderr
    assert "executing a step on fake tensors" in done.stderr
    summary, cell = json.loads(done.stdout), measured()["fsdp.json"]
    memory, step = summary["memory"], summary["step"]
    assert memory["executed"] is True
    assert memory["peak"] == cell["peak"]
    assert {kind: memory[kind] for kind in cell["kinds"]} == cell["kinds"]
    assert memory["formula"]["peak"] == round(formula_peak(shipped_cases()["fsdp.json"]).total)
    assert summary["memory_fit"]["fits"] is True
    assert [list(row.values()) for row in step["collectives"]] == cell["collectives"]
    found = without_line_numbers(step)
    assert (found["host_reads"], found["deferred_reads"]) == (cell["host_reads"], cell["deferred_reads"])


@NEEDS_DEVICE
@pytest.mark.integration
@pytest.mark.sweep
def test_an_architecture_that_the_formulas_do_not_know_is_executed(tokens: Path, tmp_path: Path) -> None:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    gpt2 = {"config": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, **dropout}}
    config = tiny_config(tokens, tmp_path / "run", engine="torch")
    path = write_config(tmp_path / "c.json", {**config, "model": gpt2})
    without = warm.run("-m", "pipeline", "check", "--config", path)
    assert "not known for gpt2" in without.stdout
    said = output_of(warm.run("-m", "pipeline", "check", "--config", path, "--exact", "--memory", "1GB"))
    assert "MB per rank, executed on fake tensors" in said
    assert "fits 1.0 GB" in said


@pytest.mark.parametrize("lacks", ["g++", "a CPU build", "deepspeed"])
def test_a_machine_is_told_what_it_lacks(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    if lacks == "g++":
        monkeypatch.setattr(shutil, "which", lambda _name: None)
    elif lacks == "deepspeed":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == lacks else find_spec(name))
    else:
        monkeypatch.setattr(guard, "_torch_version", lambda: "2.13.0+cu130")
    with pytest.raises(ConfigError, match=lacks.replace("+", r"\+")):
        check_exact("deepspeed", distils=False, matrices=False)


def test_the_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match="reference"):
        check_exact("reference", distils=False, matrices=False)


def test_kernels_of_gpus_for_the_exchange_of_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"deepep's kernels run on GPUs alone \(parallel.ep_exchange\)"):
        check_exact("torch", distils=False, matrices=False, exchange="deepep")


def test_exact_without_a_model_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tmp_path / "tokens", tmp_path / "run", engine="torch"))
    done = warm.run("-m", "pipeline", "check", "--config", path, "--exact", "--rules-only", merged=True)
    assert done.returncode == 2
    assert "--rules-only" in done.stdout


def test_a_later_stage_of_deepspeeds_pipeline_is_refused_before_it_is_executed() -> None:
    case = shipped_cases()["3d.json pp 0"]
    run, model = built(case)
    ranks = []

    def execute(given: Any) -> Executed:
        ranks.append(list(given))
        return Executed(given[0], measured()["3d.json pp 0"], 1.0)

    [entry] = memory_entries(run, model, execute=execute)
    assert ranks == [[0]]  # the first stage, which needs most, can be executed
    assert entry.values == {**entry.values, "peak": measured()["3d.json pp 0"]["peak"], "executed": True}
    assert "weights" not in entry.values  # DeepSpeed's flat buffers hold several kinds
    model.config.num_attention_heads = 0  # no formula says which needs most
    with pytest.raises(ConfigError, match="stage before"):
        list(memory_entries(run, model, execute=execute))


@NEEDS_DEVICE
@pytest.mark.integration
def test_an_interrupt_ends_the_process_that_executes(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch", train_batch_size=4096)
    path = write_config(tmp_path / "c.json", {**config, "train_micro_batch_size_per_gpu": 1})  # takes minutes
    command = [sys.executable, "-m", "pipeline", "check", "--config", str(path), "--exact"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as check:
        workers = _wait_for_worker(psutil.Process(check.pid))
        time.sleep(1)
        os.kill(check.pid, signal.SIGINT)
        check.communicate(timeout=120)
    assert check.returncode == 130
    assert not psutil.wait_procs(workers, timeout=120)[1]


def _wait_for_worker(process: psutil.Process) -> list[psutil.Process]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.is_running():
        workers = [each for each in process.children() if "pipeline.plan.fake_gpu.worker" in each.cmdline()]
        if workers:
            return workers
        time.sleep(0.1)
    raise AssertionError("no process executes a step")


@pytest.mark.integration
def test_a_selective_recomputation_gathers_weights() -> None:
    layers = ("model.config.num_hidden_layers=4", "train_batch_size=16", "memory.activation_checkpointing=selective")
    zero3 = ("engine=deepspeed", "zero_optimization.stage=3")
    case = StepCase("ds_configs/llama_8b_8gpu.json", 8, overrides=(*layers, *zero3), steps=2)
    with case_process() as result_of:
        assert "error" not in result_of(case)
