"""The table of CONTRIBUTING.md: its paths exist and are few; an optimizer or a schedule needs what its row says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.format.metadata import read_metadata
from pipeline.runtime.launch.group import free_port
from tests.conftest import ROOT, tiny_config, write_config

TABLE = (ROOT / "CONTRIBUTING.md").read_text().partition("| to add | you touch |")[2]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| ")]

# Signum (Bernstein et al. 2018), without weight decay
SIGNUM = """
import torch

def build(groups, params, *, lr, fused):
    return Signum(groups, {"lr": lr, "beta": params.betas[0]})

class Signum(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight]["exp_avg"].lerp_(weight.grad, 1 - group["beta"])
                weight -= group["lr"] * momentum.sign()
"""
OPTIMIZER = 'OptimizerKind("Signum", ("exp_avg",), {"betas": _BETAS}, state_beta=0, sign_like=True),'
SCHEDULE = '"bfs": PipelineKind("ScheduleLoopedBFS", virtual_stages=True, in_flight=lambda count, _pp: count),'
COMMANDS = """
import importlib.util, sys
import pipeline.config.sections, pipeline.engines.optim
folder, table, config = sys.argv[1:]
name = f"pipeline.config.sections.{table}"
spec = importlib.util.spec_from_file_location(name, f"{folder}/{table}.py")
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
pipeline.engines.optim.__path__.append(folder)
from pipeline.__main__ import main
for verb, *options in (["check", "--verbose"], ["train"]):
    sys.argv = ["headrace", verb, "--config", config, *options]
    if main():
        sys.exit(verb)
"""


def checked_and_trained(
    folder: Path, config: dict[str, Any], table: str, after: str, entry: str, ranks: int = 1
) -> str:
    """What rank 0 of `headrace check` and `headrace train` says where a table has one more entry."""
    text = (ROOT / f"pipeline/config/sections/{table}.py").read_text()
    assert text.count(after) == 1
    (folder / f"{table}.py").write_text(text.replace(after, f"{after}    {entry}\n"))
    command = [sys.executable, "-c", COMMANDS, str(folder), table, str(write_config(folder / "c.json", config))]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    started = []
    for rank in range(ranks):
        env = {**os.environ, **world, "LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT)
        )
    said = [each.communicate(timeout=300)[0] for each in started]
    assert [each.returncode for each in started] == [0] * ranks, said
    assert "finished: 1 steps" in said[0]
    return said[0]


@pytest.mark.parametrize(("what", "files"), ROWS, ids=[row[0] for row in ROWS])
def test_at_most_four_files_are_touched_and_exist(what: str, files: str) -> None:
    paths = re.findall(r"`([\w.]+(?:/[\w.]+)*(?:/|\.py|\.json))`", files)
    assert 0 < len(paths) <= 4, what
    assert [path for path in paths if "/" in path and not [*ROOT.glob(path.replace("NAME", "*"))]] == []


def one_step(tokens: Path, tmp_path: Path, **fields: Any) -> dict[str, Any]:
    config = tiny_config(tokens, tmp_path / "run", engine="torch", zero_optimization={"stage": 0}, **fields)
    config["run"]["steps"] = 1
    del config["scheduler"]
    return config


@pytest.mark.integration
def test_an_optimizer_is_one_file_and_one_entry(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "signum.py").write_text(SIGNUM)
    config = one_step(tokens, tmp_path, optimizer={"type": "signum", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}})
    # CompleteP asks whether its rules hold for the optimizer
    base = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config["model"] |= {"parametrization": "completep", "base": base}
    said = checked_and_trained(tmp_path, config, "optimizers", "KINDS = (\n", OPTIMIZER)
    assert "Signum, betas [0.9, 0.99], weight_decay 0.0; 1 state tensor per parameter: 8 bytes" in said
    assert "12 held on the device with fp32 states and the gradient" in said
    tensors = read_metadata(tmp_path / "run/checkpoints/step-00000001").tensors
    assert {each.key.partition("/")[0] for each in tensors} == {"weight", "exp_avg"}


@pytest.mark.integration
def test_a_schedule_of_torch_is_one_entry(tokens: Path, tmp_path: Path) -> None:
    config = one_step(tokens, tmp_path, parallel={"pp": 2, "schedule": "bfs"})
    config["model"]["config"]["num_hidden_layers"] = 4
    said = checked_and_trained(tmp_path, config, "layout", "SCHEDULES = {\n", SCHEDULE, ranks=2)
    assert "pp 2; bfs, 2 virtual stages per rank" in said
