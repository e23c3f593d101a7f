"""Laws 3 and 4 for the DeepSpeed engine: layouts of every kind match one process, and states are exchanged with it.

The micro-batches are synthetic. Layouts that `tests/parity` covers, with complete training runs, are not repeated here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from pipeline.config.sections.deepspeed import Fp16Section, ZeroSection
from pipeline.engines.deepspeed import machine
from pipeline.engines.deepspeed.machine import check_machine
from pipeline.engines.deepspeed.operators import remove_stale_locks
from tests.engines.comparison import (
    EXPERTS,
    assert_within_tolerance,
    compare_layouts,
    differences_fixture,
    layout,
    layout_params,
)

BF16 = {"bf16": {"enabled": True}}
ON_THE_CPU = {"device": "cpu"}
# every parameter is partitioned, and buckets are filled more than once
SMALL = {"stage3_param_persistence_threshold": 0, "sub_group_size": 4096, "reduce_bucket_size": 4096}
ON_TWO = {
    # gradients overflow at the initial scale: the layout and the reference must skip the same steps
    "stage 0, fp16": layout(0, fp16={"enabled": True, "initial_scale_power": 22, "hysteresis": 1}),
    "stage 1, bf16, optimizer on the cpu": layout(1, zero={"offload_optimizer": ON_THE_CPU}, **BF16),
    "stage 3, optimizer and weights on the cpu": layout(
        3, zero={"offload_optimizer": ON_THE_CPU, "offload_param": ON_THE_CPU, **SMALL}
    ),
    "stage 3, bf16, reduced in bf16": layout(3, zero=SMALL, communication_data_type="bf16", **BF16),
    "pp 2, stage 1, 3 times as fast on the first rank": layout(1, parallel={"pp": 2, "stage_speeds": [3, 1]}),
    "experts, stage 3": layout(3, zero=SMALL, model=EXPERTS),
}
ON_FOUR = {"stage 3, hpZ, 2 of 4": layout(3, zero={**SMALL, "zero_hpz_partition_size": 2})}
LARGE_EXPERTS = {**EXPERTS, "moe_intermediate_size": 128}
ALWAYS = {
    "stage 0, fp16",
    "stage 3, optimizer and weights on the cpu",
    "stage 3, bf16, reduced in bf16",
    "pp 2, stage 1, 3 times as fast on the first rank",
}
"""The others run with `make sweep-tests`."""

found = differences_fixture("test_a_layout_follows_one_process", {"deepspeed": {2: ON_TWO, 4: ON_FOUR}})
TAKE = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("taken", flush=True)
time.sleep(600)
"""


@pytest.mark.integration
@pytest.mark.parametrize("name", layout_params(ALWAYS, ON_TWO, ON_FOUR))
def test_a_layout_follows_one_process(found: dict[str, dict[str, float]], name: str) -> None:
    assert_within_tolerance(found[name], name)
    if "fp16" in name:  # the steps that overflow are skipped, and no others of the 4
        assert 0 < found[name]["skipped"] < 4


@pytest.mark.sweep  # DeepSpeed compiles its AIO operator for minutes at first use
def test_nvme_offload_follows_one_process_and_its_state_is_saved_and_loaded(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    # tensors below 1 MiB stay in memory: the model must be large enough that most are offloaded
    model = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    zero = {"sub_group_size": 300_000, "offload_optimizer": disk}
    with_weights = {**zero, "offload_param": {**disk, "buffer_size": 1_000_000, "max_in_cpu": 0}}
    cases = {
        "optimizer": layout(3, zero=zero, model=model),
        "optimizer and weights": layout(3, zero=with_weights, model=model),
        "experts": layout(3, zero=with_weights, model={**model, **LARGE_EXPERTS}, parallel={"ep": 2}),
    }
    for name, differences in compare_layouts(tmp_path, "deepspeed", cases, processes=2).items():
        assert_within_tolerance(differences, name)
    assert list(tmp_path.glob("headrace-*/zero_stage_3/optimizer/rank1/*.swp"))


def test_nvme_offload_is_refused_on_a_gpu_without_the_toolkit_that_compiles_its_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.git_version_info import installed_ops  # noqa: PLC0415

    zero = ZeroSection.model_validate({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local"}})
    monkeypatch.setattr(machine, "_has_libaio", lambda: True)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    check_machine(zero, Fp16Section())  # compiled for the CPU
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    with pytest.raises(ConfigError, match=r"(?s)offload_param\.device.*the CUDA toolkit 13\.0, and set CUDA_HOME"):
        check_machine(zero, Fp16Section())
    with monkeypatch.context() as compiled:
        compiled.setitem(installed_ops, "async_io", True)
        check_machine(zero, Fp16Section())
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/usr/local/cuda")
    check_machine(zero, Fp16Section())


def test_fp16_with_zero_is_refused_on_a_machine_without_fp16() -> None:
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415

    if get_accelerator().is_fp16_supported():
        pytest.skip("this processor runs fp16")
    fp16 = Fp16Section(enabled=True)
    check_machine(ZeroSection(stage=0), fp16)
    with pytest.raises(ConfigError, match=r"fp16\.enabled"):
        check_machine(ZeroSection(stage=1), fp16)


def take(lock: Path) -> subprocess.Popen[str]:
    """Starts a process that holds a lock as torch does while it compiles."""
    lock.parent.mkdir(parents=True)
    holder = subprocess.Popen([sys.executable, "-c", TAKE, str(lock)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "taken\n"
    return holder


@pytest.mark.integration
def test_only_the_lock_of_a_killed_process_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale, held = tmp_path / "py311_cpu/stale/lock", tmp_path / "held/lock"
    killed, live = take(stale), take(held)
    killed.kill()
    killed.communicate()
    try:
        remove_stale_locks(tmp_path, old_s=0.0)
        assert not stale.exists()
        assert held.exists()
    finally:
        live.kill()
        live.communicate()
    assert f"removing {stale}" in capsys.readouterr().err


def test_a_lock_that_another_host_may_hold_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "op/lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setattr(os, "major", lambda _device: 0)  # as on a network file system
    monkeypatch.setattr("pipeline.engines.deepspeed.operators.CONFIRM_S", 0.2)
    remove_stale_locks(tmp_path, old_s=2.0)
    output = capsys.readouterr().err
    assert not lock.exists()
    assert f"waiting for {lock}" in output
    assert "delete it" in output


def test_a_missing_build_directory_is_no_error(tmp_path: Path) -> None:
    remove_stale_locks(tmp_path / "none")
