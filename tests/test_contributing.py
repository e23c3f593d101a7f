"""The table of CONTRIBUTING.md: its paths exist, they are few, and an optimizer needs no more than its row says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.checkpoint.format.metadata import read_metadata
from tests.conftest import ROOT, tiny_config, write_config

TABLE = (ROOT / "CONTRIBUTING.md").read_text().partition("| to add | you touch |")[2]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| ")]

# Signum (Bernstein et al. 2018), without weight decay
TOY = """
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
ENTRY = '    OptimizerKind("Signum", ("exp_avg",), {"betas": _BETAS}, state_beta=0, sign_like=True),\n'
HEADRACE = """
import importlib.util, sys
import pipeline.config.sections, pipeline.engines.optim
folder, config, name = *sys.argv[1:], "pipeline.config.sections.optimizers"
spec = importlib.util.spec_from_file_location(name, folder + "/optimizers.py")
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
pipeline.engines.optim.__path__.append(folder)
from pipeline.__main__ import main
for verb in ("check", "train"):
    sys.argv = ["headrace", verb, "--config", config]
    if main():
        sys.exit(verb)
"""


@pytest.mark.parametrize(("what", "files"), ROWS, ids=[row[0] for row in ROWS])
def test_at_most_four_files_are_touched_and_exist(what: str, files: str) -> None:
    paths = re.findall(r"`([\w.]+(?:/[\w.]+)*(?:/|\.py|\.json))`", files)
    assert 0 < len(paths) <= 4, what
    assert [path for path in paths if "/" in path and not [*ROOT.glob(path.replace("NAME", "*"))]] == []


def test_an_optimizer_is_one_file_and_one_entry(tokens: Path, tmp_path: Path) -> None:
    table = (ROOT / "pipeline/config/sections/optimizers.py").read_text()
    (tmp_path / "optimizers.py").write_text(table.replace("KINDS = (\n", f"KINDS = (\n{ENTRY}"))
    (tmp_path / "signum.py").write_text(TOY)
    signum = {"type": "signum", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}}
    config = tiny_config(tokens, tmp_path / "run", engine="torch", optimizer=signum, zero_optimization={"stage": 0})
    # CompleteP asks whether its rules hold for the optimizer
    base = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config["model"] |= {"parametrization": "completep", "base": base}
    config["run"]["steps"] = 1
    del config["scheduler"]
    path = write_config(tmp_path / "c.json", config)
    command = [sys.executable, "-c", HEADRACE, str(tmp_path), str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "Signum, betas [0.9, 0.99], weight_decay 0.0; 1 state tensor per parameter: 8 bytes" in done.stdout
    assert "12 held on the device with fp32 states and the gradient" in done.stdout
    assert "finished: 1 steps" in done.stdout
    tensors = read_metadata(tmp_path / "run/checkpoints/step-00000001").tensors
    assert {each.key.partition("/")[0] for each in tensors} == {"weight", "exp_avg"}
