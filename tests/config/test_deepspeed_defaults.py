"""The default of every key that DeepSpeed owns is DeepSpeed's, or differs on purpose, is printed and documented."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.monitor.config import TensorBoardConfig, WandbConfig
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lion import FusedLion
from deepspeed.runtime import constants, lr_schedules
from deepspeed.runtime import precision_config as precision
from deepspeed.runtime.config import get_pipeline_config
from deepspeed.runtime.swap_tensor import constants as aio
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero import offload_config as offload
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from foundation.config_kinds import keys
from foundation.json_schema import Key
from pipeline.config.deepspeed.auto import OWNED
from pipeline.config.deepspeed.defaults import DEFAULTS, DIFFERENCES
from pipeline.config.load import LoadedConfig, read_config
from pipeline.config.schedule import Schedule, make_schedule
from pipeline.config.sections.deepspeed import SchedulerSection
from pipeline.config.sections.optimizers import OPTIMIZERS
from tests.conftest import ROOT, tiny_config, write_config

SECTIONS = (*OWNED, "communication_data_type", "sequence_parallel_size", "wandb", "tensorboard")
OURS = {
    "optimizer.params.adjust_lr",
    "optimizer.params.ns_steps",
    "optimizer.params.qk_clip",
    # DeepSpeed's, without a default in a signature: see `runtime/engine.py`, `_muon_param_groups`
    *(f"optimizer.params.{name}" for name in ("muon_lr", "adam_lr", "ns_method")),
    "optimizer.params.moments_dtype",
    "scheduler.count",
    "scheduler.params.decay_num_steps",  # WSD is ours
    "scheduler.params.min_ratio",
    *(f"train_batch_size.{name}" for name in ("from", "to", "over_tokens", "by")),  # a ramp in the place of the number
}
"""Keys of our own in DeepSpeed's sections."""


def fields_of(model: Any) -> dict[str, Any]:
    return {field.alias or name: field.default for name, field in model.model_fields.items()}


def arguments_of(function: Any) -> dict[str, Any]:
    return {name: each.default for name, each in inspect.signature(function).parameters.items()}


def named(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def installed() -> dict[str, Any]:
    """Key -> default, as the installed deepspeed has it."""
    capitals = {name[: -len("_DEFAULT")].lower(): value for name, value in vars(constants).items() if "DEFAULT" in name}
    schedules = [
        arguments_of(each) for each in (lr_schedules.WarmupCosineLR, lr_schedules.WarmupLR, lr_schedules.WarmupDecayLR)
    ]
    params = {name: value for each in schedules for name, value in each.items()}
    aio_defaults = {
        name[len("AIO_") : -len("_DEFAULT")].lower(): value
        for name, value in vars(aio).items()
        if name.endswith("_DEFAULT")
    }
    return {
        **capitals,
        **named("optimizer.params", {**arguments_of(torch.optim.SGD), **arguments_of(FusedAdam)}),
        **named("scheduler.params", {**params, "total_num_steps": None}),
        **named("zero_optimization", fields_of(DeepSpeedZeroConfig)),
        **named("zero_optimization.offload_optimizer", fields_of(offload.DeepSpeedZeroOffloadOptimizerConfig)),
        **named("zero_optimization.offload_param", fields_of(offload.DeepSpeedZeroOffloadParamConfig)),
        **named("bf16", fields_of(precision.DeepSpeedBF16Config)),
        **named("fp16", fields_of(precision.DeepSpeedFP16Config)),
        **named("tensor_parallel", fields_of(TPTrainingConfig)),
        **named("expert_parallel", vars(AutoEPConfig())),
        **named("pipeline", get_pipeline_config({})),
        **named("aio", aio_defaults),
        **named("data_types", {"grad_accum_dtype": constants.GRAD_ACCUM_DTYPE_DEFAULT}),
        **named("wandb", fields_of(WandbConfig)),
        **named("tensorboard", fields_of(TensorBoardConfig)),
        "optimizer.type": constants.OPTIMIZER_TYPE_DEFAULT,
        "scheduler.type": constants.SCHEDULER_TYPE_DEFAULT,
        "optimizer.params.torch_adam": False,  # engine.py: pop(TORCH_ADAM_PARAM, False)
        "sequence_parallel_size": None,
    }


def honoured() -> dict[str, Key]:
    found = {key.path: key for key in keys("run") if not key.is_section or key.path == "train_batch_size"}
    return {path: key for path, key in found.items() if path.split(".")[0] in SECTIONS and path not in OURS}


def test_the_table_has_every_key_that_is_honoured_and_no_other() -> None:
    assert set(DEFAULTS) == set(honoured())


def test_the_defaults_of_the_table_are_those_of_the_installed_deepspeed() -> None:
    theirs = installed()
    assert {key: getattr(theirs[key], "value", theirs[key]) for key in DEFAULTS} == DEFAULTS


def test_lions_defaults_are_deepspeeds() -> None:
    theirs = arguments_of(FusedLion)
    assert OPTIMIZERS["Lion"].defaults["betas"] == theirs["betas"]
    assert theirs["lr"] == DEFAULTS["optimizer.params.lr"]


def test_our_default_is_deepspeeds_or_is_listed_with_its_reason() -> None:
    other = set()
    for key, theirs in DEFAULTS.items():
        ours, name = honoured()[key].node.get("default"), key.rpartition(".")[2]
        if ours is None:  # not passed on, so that theirs holds; or filled in by the kind of optimizer
            ours = {**OPTIMIZERS["SGD"].defaults, **OPTIMIZERS["AdamW"].defaults}.get(name, theirs)
        if ours != theirs:
            other.add(key)
    assert other <= {each.key for each in DIFFERENCES}
    assert all(each.why for each in DIFFERENCES)


def test_a_description_that_names_deepspeeds_default_names_the_right_one() -> None:
    seen = 0
    for path, key in honoured().items():
        text = key.node.get("description", "")
        for value in re.findall(r"DeepSpeed's\s+default\s+is ([\w.]+)", text):
            seen += 1
            plain = value.rstrip(".").lower()
            theirs = DEFAULTS[path]
            if path == "zero_optimization.overlap_comm":
                assert plain == "true"  # at stage 3, by its validator
            elif isinstance(theirs, bool):
                assert plain == str(theirs).lower(), path
            else:
                assert float(plain) == theirs, path
    assert seen > 10


@pytest.mark.parametrize(("kind", "theirs"), [("WarmupLR", 1000), ("WarmupCosineLR", 1000), ("WarmupDecayLR", 1000)])
def test_a_schedule_without_parameters_is_deepspeeds(kind: str, theirs: int) -> None:
    made = make_schedule(SchedulerSection(type=kind), lr=1e-3, steps=5000)
    cosine = kind == "WarmupCosineLR"
    end = 0.0001
    assert made == Schedule(kind, 1e-3, 0.0, theirs, True, 5000, end_ratio=end)
    assert not cosine or DEFAULTS["scheduler.params.cos_min_ratio"] == end


def loaded(tmp_path: Path, *, without: tuple[str, ...] = (), **fields: Any) -> LoadedConfig:
    raw = tiny_config(tmp_path / "tokens", tmp_path / "run", **fields)
    return read_config(
        write_config(tmp_path / "c.json", {key: value for key, value in raw.items() if key not in without})
    )


def test_an_absent_gradient_clipping_is_1_as_in_deepspeed(tmp_path: Path) -> None:
    assert loaded(tmp_path, without=("gradient_clipping",)).config.gradient_clipping == 1.0
    same = {"type": "AdamW", "params": {"lr": 1e-4, "max_grad_norm": 1.0}}
    read = loaded(tmp_path, without=("gradient_clipping",), optimizer=same)
    assert read.ignored == ("optimizer.params.max_grad_norm = 1.0",)


def test_what_differs_from_deepspeed_in_the_curve_is_said_where_the_file_leaves_it_open(tmp_path: Path) -> None:
    half = loaded(tmp_path, bf16={"enabled": True})
    assert [each.partition(":")[0] for each in half.differs] == [
        "communication_data_type",
        "data_types.grad_accum_dtype",
        "optimizer.params.weight_decay",
    ]
    plain = {"type": "AdamW", "params": {"lr": 1e-4}}
    said = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32", "optimizer": plain}
    assert loaded(tmp_path, bf16={"enabled": True}, **said).differs == ()
    warmup = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}}
    assert "0.001 (WarmupDecayLR)" in loaded(tmp_path, optimizer=plain, scheduler=warmup).differs[0]


def test_the_decay_of_torchs_adam_is_torchs(tmp_path: Path) -> None:
    read = loaded(tmp_path, optimizer={"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}})
    assert read.config.optimizer.params.weight_decay == arguments_of(torch.optim.AdamW)["weight_decay"]
    assert "optimizer.params.weight_decay = 0.01 (torch_adam)" in read.auto


def test_without_an_optimizer_section_the_trainers_is_taken_and_said(tmp_path: Path) -> None:
    read = loaded(tmp_path, without=("optimizer",))
    assert read.config.optimizer.params.lr == 5e-5
    assert "optimizer.params.lr = 5e-05" in read.auto
    changed = read_config(tmp_path / "c.json", ["optimizer.params.lr=2e-4"])
    assert (changed.config.optimizer.params.lr, changed.auto) == (2e-4, ())


def test_every_difference_is_in_the_page_of_the_config() -> None:
    page = (ROOT / "docs/reference/config.md").read_text()
    for each in DIFFERENCES:
        name = each.key.rpartition(".")[2] if each.key.startswith("scheduler") else each.key
        assert f"`{each.key}`" in page or f"`{name}`" in page, each.key


FOLDERS = ("ds_configs", "examples", "demo", "k8s")
SHIPPED = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.json"))]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_shipped_config_states_what_decides_its_curve(path: Path) -> None:
    text = path.read_text()
    if '"extends"' in text or '"zero_optimization"' not in text:
        return
    assert '"gradient_clipping"' in text
    assert '"optimizer"' in text or path.parent.name == "examples"  # the code of an example brings its own
