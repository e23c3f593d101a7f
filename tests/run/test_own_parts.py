"""Parts that the user wrote: `loss.function`, `callbacks` and `sinks` as "module:function"."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from foundation.errors import ConfigError
from foundation.user_function import UserFunction, load_function, spelled
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.user_loss import UserLoss, check_user_loss
from tests.conftest import launch, losses, start, tiny_config, write_config

PARTS = """
import torch.nn.functional as F
from pipeline.run.hooks.hook import Hook

def loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")

class Largest(Hook):
    def __init__(self, path):
        self.path, self.largest = path, 0.0
    def numbers(self, numbers, *, raised):
        self.largest = max(self.largest, numbers.result.loss)
    def end(self, step):
        self.path.write_text(f"{step} {self.largest}")

def make(context):
    return Largest(context.here.prepared.run_dir / f"largest-{context.here.rank}")

def not_a_hook(context):
    return 7

class Rows:
    def __init__(self, path):
        self.file = path.open("a")
    def write(self, kind, step, **values):
        print(kind, step, file=self.file, flush=True)

def open_sink(run_dir, config):
    return Rows(run_dir / "rows")
"""
OWN = {"loss": {"function": "own_parts:loss"}, "callbacks": ["own_parts:make"], "sinks": ["own_parts:open_sink"]}


@pytest.mark.parametrize(("engine", "stage"), [("torch", 3), ("deepspeed", 2)])
def test_a_cross_entropy_of_ones_own_trains_as_ours_and_is_the_same_on_resume(
    tokens: Path, tmp_path: Path, engine: str, stage: int
) -> None:
    (tmp_path / "own_parts.py").write_text(PARTS)
    fields: dict[str, Any] = {"engine": engine, "zero_optimization": {"stage": stage}}
    plain = tiny_config(tokens, tmp_path / "plain", **fields)
    own = tiny_config(tokens, tmp_path / "own", **fields, **OWN)
    for config in (plain, own):
        config |= {"scheduler": None}
    launch("train.py", write_config(tmp_path / "p.json", plain), "run.steps=4", processes=2)
    path = write_config(tmp_path / "o.json", own)
    launch("train.py", path, "run.steps=4", processes=2)
    run = tmp_path / "own"
    assert losses(run) == pytest.approx(losses(tmp_path / "plain"), abs=1e-5)
    largest = max(losses(run).values())
    for rank in (0, 1):
        step, value = (run / f"largest-{rank}").read_text().split()
        assert int(step) == 4
        assert float(value) == pytest.approx(largest)
    rows = (run / "rows").read_text().splitlines()
    assert {"step 1", "step 4", "eval 4"} < set(rows)
    (tmp_path / "own_parts.py").write_text(PARTS.replace('reduction="sum")', 'reduction="sum") * 1.0'))
    refused = start("train.py", path, "run.steps=5")
    assert refused.returncode == 2, refused.stdout
    assert "loss.function.source_sha256" in refused.stdout
    launch("train.py", path, "run.steps=5", 'run.allow_change=["loss.function","callbacks","run.steps"]')
    assert 5 in losses(run)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"callbacks": ["own_parts:not_a_hook"]}, "callbacks.0 = 'own_parts:not_a_hook'|it returned 7, no Hook"),
        ({"callbacks": ["own_parts:missing"]}, "has no function missing|one of its own: Largest, Rows, loss, make"),
        ({"sinks": ["own_part:open_sink"]}, "the module own_part cannot be imported|PYTHONPATH"),
    ],
)
def test_wrong_parts_are_refused_with_their_key(
    tokens: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    (tmp_path / "own_parts.py").write_text(PARTS)
    config = tiny_config(tokens, tmp_path / "run", engine="torch", zero_optimization={"stage": 0}, **change)
    done = start("train.py", write_config(tmp_path / "c.json", config))
    assert done.returncode == 2, done.stdout
    assert all(word in done.stdout for word in words.split("|")), done.stdout


def own(logits: torch.Tensor, labels: torch.Tensor, *, reduction: str = "sum") -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (partial(own, reduction="mean"), "it is no sum"),
        (lambda logits, labels: logits.square().sum() + 0 * labels.sum(), "label is -100 change it"),
        (lambda logits, labels, weights: logits.sum() + labels.sum() + weights, "failed with TypeError.* missing 1"),
        (lambda logits, labels: own(logits, labels).expand(3), "failed with RuntimeError: grad can be"),
        (lambda logits, _labels: float(logits.sum()), "failed with"),
    ],
)
def test_a_loss_that_is_no_sum_over_targets_is_refused(function: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        check_user_loss(UserFunction("m:f", function, Path(__file__)))
    assert "the sum (not the mean)" in str(refused.value)


def test_the_gradient_is_that_of_the_built_in_loss() -> None:
    logits, labels = torch.randn(2, 5, 13), torch.randint(0, 13, (2, 5))
    labels[0, 2] = -100
    (ours, gradient), (theirs, expected) = (
        each.with_gradient(logits, labels) for each in (UserLoss(own), CrossEntropy())
    )
    assert float(ours.total) == pytest.approx(float(theirs.total))
    torch.testing.assert_close(gradient, expected)
    check_user_loss(UserFunction("m:f", own, Path(__file__)))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("parallel.tp", {"parallel": {"tp": 2}, "zero_optimization": {"stage": 0}}),
        ("loss.z_loss", {"loss": {"function": "a:b", "z_loss": 1e-4}}),
        ("loss.mtp", {"loss": {"function": "a:b", "mtp": {}}}),
    ],
)
def test_a_loss_of_ones_own_is_refused_where_it_would_not_be_the_loss(
    tmp_path: Path, key: str, change: dict[str, Any]
) -> None:
    config = {**tiny_config(tmp_path, tmp_path / "run", engine="torch", loss={"function": "a:b"}), **change}
    with pytest.raises(ConfigError, match=f"{key} is given") as refused:
        resolve(load_config(write_config(tmp_path / "c.json", config)), world_size=2)
    assert refused.value.field == "loss.function"


def test_a_name_has_to_be_module_and_function(tmp_path: Path) -> None:
    for wrong in ("parts.py:loss", "./parts:loss", "parts", "parts:a.b", ":loss"):
        with pytest.raises(ConfigError) as refused:
            load_config(write_config(tmp_path / "c.json", tiny_config(tmp_path, tmp_path, loss={"function": wrong})))
        assert "write module:function" in str(refused.value), wrong


def test_functions_are_spelled_as_other_processes_import_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_the_command.py").write_text("def loss():\n    pass\n")
    found = load_function("beside_the_command:loss", field="loss.function")
    assert spelled(found.call) == "beside_the_command:loss"
    sys.modules.pop("beside_the_command")
    assert spelled(lambda: None) is None
    assert spelled(json.loads) == "json:loads"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ({"loss": {"function": json.loads}}, "loss.function", 'write "json:loads"'),
        ({"loss": json.loads}, "loss", 'write {"function": "json:loads"}'),
        ({"callbacks": [lambda _context: None]}, "callbacks.0", 'write "my_parts:loss"'),
        ({"optimizer": {"params": {"lr": torch.tensor(0.1)}}}, "optimizer.params.lr", "a number"),
    ],
)
def test_a_function_given_to_the_python_api_is_refused_with_what_to_write(
    tmp_path: Path, overrides: dict[str, Any], key: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        headrace.train(tiny_config(tmp_path, tmp_path / "run"), **overrides)
    assert refused.value.field == key


def test_the_package_lists_its_functions_without_importing_them() -> None:
    assert {"train", "load", "prepare_corpus", "__version__"} <= set(dir(headrace))
