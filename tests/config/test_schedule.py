"""Learning-rate schedules: DeepSpeed's schedulers step for step, and WSD by its formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.schedule import Schedule, make_schedule
from pipeline.config.sections.run import Config
from tests.conftest import launch, losses, tiny_config, write_config

MINIMAL = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"sources": [{"path": "t"}], "sequence_length": 16},
    "run": {"dir": "r", "steps": 40},
    "optimizer": {"params": {"lr": 0.02}},
}


def schedule(kind: str, **params: Any) -> Schedule:
    config = parse(Config, {**MINIMAL, "scheduler": {"type": kind, "params": params}})
    return make_schedule(config.scheduler, lr=config.optimizer.params.lr, steps=40)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear", "warmup_min_lr": 0.001}),
    ("WarmupDecayLR", {"warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"warmup_num_steps": 7, "warmup_min_lr": 0.002, "total_num_steps": 30}),
    ("WarmupCosineLR", {"warmup_num_steps": 5}),
    ("WarmupCosineLR", {"warmup_num_steps": 5, "warmup_type": "linear", "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}),
]


@pytest.mark.parametrize(("kind", "params"), CASES)
def test_learning_rates_equal_deepspeeds_schedulers_at_every_step(kind: str, params: dict[str, Any]) -> None:
    from deepspeed.runtime import lr_schedules  # noqa: PLC0415  imports for seconds

    ours = schedule(kind, **params)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    theirs_params = {"total_num_steps": 40, **params} if kind != "WarmupLR" else params
    if kind == "WarmupDecayLR":
        theirs_params = {"warmup_max_lr": 0.02, **theirs_params}  # its default is 0.001, whatever the optimizer's lr is
    theirs = getattr(lr_schedules, kind)(optimizer, **theirs_params)
    for step in range(1, 41):
        # the engine updates with the rate that is set, then steps the scheduler
        assert ours.lr(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-15), step
        theirs.step()


def test_wsd_warms_up_stays_constant_and_decays_to_min_ratio() -> None:
    wsd = schedule("WSD", warmup_num_steps=4, decay_num_steps=10, min_ratio=0.1)
    assert [wsd.lr(step) for step in (1, 2, 4, 5, 30)] == pytest.approx([0.005, 0.01, 0.02, 0.02, 0.02])
    assert wsd.lr(35) == pytest.approx(0.02 * (0.1 + 0.9 * 0.5))
    assert wsd.lr(40) == pytest.approx(0.002)


def test_no_warmup_is_wsds_alone_since_deepspeed_raises() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        schedule("WarmupLR", warmup_num_steps=0)


def test_wsd_without_warmup_is_the_decay_alone() -> None:
    wsd = schedule("WSD", warmup_num_steps=0, decay_num_steps=40, min_ratio=0.1)
    assert [wsd.lr(step) for step in (1, 20, 40)] == pytest.approx([0.01955, 0.011, 0.002])


def test_without_a_scheduler_the_rate_is_constant() -> None:
    constant = make_schedule(None, lr=parse(Config, MINIMAL).optimizer.params.lr, steps=40)
    assert {constant.lr(step) for step in (1, 17, 40)} == {0.02}


def test_a_parameter_of_another_scheduler_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cos_min_ratio = 0\.1\n.*WSD has no such parameter"):
        schedule("WSD", cos_min_ratio=0.1)


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="longer than the whole schedule of 40 steps"):
        schedule("WarmupCosineLR", warmup_num_steps=41)
    with pytest.raises(ConfigError, match="longer than the schedule of 40 steps"):
        schedule("WSD", warmup_num_steps=35, decay_num_steps=10)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupDecayLR", {"warmup_num_steps": 2, "total_num_steps": 20}),
        ("WarmupCosineLR", {"warmup_num_steps": 2, "total_num_steps": 20}),
        ("WSD", {"warmup_num_steps": 2, "decay_num_steps": 4, "total_num_steps": 20}),
    ],
)
def test_a_schedule_that_ends_at_no_rate_before_the_run_does_is_refused(kind: str, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"total_num_steps = 20\n.*the run has 40 steps, and after 20 the rate is"):
        schedule(kind, **params)
    schedule(kind, **params | {"total_num_steps": None})  # the printed remedy
    floor = {"WarmupDecayLR": "warmup_min_lr", "WarmupCosineLR": "cos_min_ratio", "WSD": "min_ratio"}[kind]
    assert schedule(kind, **params, **{floor: 0.01}).lr(40) > 0  # goes on at a rate that was asked for


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("WarmupLR", {"warmup_min_lr": 1e-2, "warmup_max_lr": 1e-5}),
        ("WarmupDecayLR", {"warmup_min_lr": 0.03}),  # the optimizer's rate is 0.02
    ],
)
def test_a_minimum_above_the_peak_is_refused(kind: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the rate would begin above its peak"):
        schedule(kind, warmup_num_steps=5, **given)


def test_a_step_is_taken_with_its_own_learning_rate(tokens: Path, tmp_path: Path) -> None:
    """After one step of a warm-up the loss is that after a step with the rate that the schedule gives the first."""
    warmup = {"type": "WSD", "params": {"warmup_num_steps": 4, "decay_num_steps": 1}}
    peak = 4e-3
    first = make_schedule(parse(Config, {**MINIMAL, "scheduler": warmup}).scheduler, lr=peak, steps=8).lr(1)
    assert 0 < first < peak
    found = []
    for name, scheduler, lr in (("warmup", warmup, peak), ("constant", None, first)):
        config = tiny_config(tokens, tmp_path / name, engine="torch", scheduler=scheduler)
        config["optimizer"]["params"]["lr"] = lr
        config["run"]["steps"] = 8
        launch("train.py", write_config(tmp_path / f"{name}.json", config), "zero_optimization.stage=0")
        found.append(losses(tmp_path / name))
    assert found[0][2] == found[1][2]
