"""What DeepSpeed needs of a machine: refusals without it, and locks of its operators that a killed process has left."""

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

TAKE = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("taken", flush=True)
time.sleep(600)
"""


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
