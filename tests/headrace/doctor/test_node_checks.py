"""Each check of a node against its fault put in; driver files, torch.cuda and nvidia-smi are stand-ins for a GPU."""

from __future__ import annotations

import os
import resource
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foundation.errors import DataError
from headrace.doctor.check import Context, Finding
from headrace.doctor.checks import compilers, config, gpus, machine, nodes, versions
from headrace.doctor.command import _unequal
from pipeline.cluster.node_checks.nvidia import nvlink_problems
from tests.conftest import tiny_config, write_config

DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs)\n"
MODES = "0, GPU-a, Enabled, Enabled, 580.65.06\n1, GPU-b, Disabled, Disabled, 580.65.06\n"
NVLINK = "".join(
    f"GPU {gpu}: NVIDIA H200 (UUID: GPU-{gpu})\n" + "".join(f"\t Link {n}: {rate}\n" for n, rate in enumerate(rates))
    for gpu, rates in enumerate((["26.562 GB/s"] * 3, ["26.562 GB/s", "<inactive>", "26.562 GB/s"]))
)


def context(work: Path, **fields: Any) -> Context:
    values = {"config": None, "overrides": (), "work": work, "all_layouts": False, "limit_s": 60.0, "node": "a"}
    return Context(**{**values, "nodes": {"a": "127.0.0.1"}, "processes": 2, **fields})


def failures(findings: Iterator[Finding]) -> list[str]:
    """The texts of failures, each of which says what it means and what to do, in one line each."""
    found = [each for each in findings if each.passed is False]
    assert all(each.meaning and each.remedy and "\n" not in each.text for each in found)
    return [each.text for each in found]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file system with an old driver and eight devices, under a torch built for CUDA 13.0."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in [name for name in os.environ if name.startswith("SLURM_") or name.endswith("VISIBLE_DEVICES")]:
        monkeypatch.delenv(name)
    for name in ("proc/driver/nvidia/version", *(f"dev/nvidia{number}" for number in range(8))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(DRIVER)
    return tmp_path


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Lets torch see GPUs with these UUIDs, and nvidia-smi print these texts."""

    def pretend(*uuids: str, modes: str = "", nvlink: str = "") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index: "NVIDIA H200")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n[ \"$1\" = nvlink ] && printf '{nvlink}' || printf '{modes}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return pretend


def test_a_driver_that_is_too_old_for_torch_or_has_no_torch_for_it_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [old] = failures(gpus.run(context(root), root=root))
    assert "the driver is 570.124.06, and CUDA 13.0 needs 580 or newer" in old
    monkeypatch.setattr(torch.version, "cuda", None)
    [on_cpu] = failures(gpus.run(context(root), root=root))
    assert "is built for the CPU alone" in on_cpu
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    [hidden] = gpus.run(context(root), root=root)
    assert (hidden.passed, hidden.figures) == (None, {"gpus": 0})


def test_half_the_gpus_twins_and_too_many_ranks_are_named(root: Path, see: Callable[..., None]) -> None:
    see("GPU-a", "GPU-b", "GPU-b", "GPU-c")
    assert failures(gpus.run(context(root), root=root)) == [
        "torch sees 4 of the 8 GPUs that the files /dev/nvidia* promises",
        "GPUs 1, 2 have one UUID, GPU-b",
    ]
    four = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    first, *_ = gpus.run(context(root, processes=4), root=root, environ=four)
    assert (first.passed, first.figures["gpus"]) == (True, 4)
    [many, *_] = failures(gpus.run(context(root, processes=5), root=root, environ=four))
    assert many == "--nproc is 5, and this node has 4 GPUs"


def test_nodes_with_other_gpus_or_versions_are_named() -> None:
    same, other = {"gpus": 8, "torch": "2.13.0"}, {"gpus": 4, "torch": "2.12.1"}
    ours = [Finding(True, "", figures=same, where=name) for name in ("a", "b")]
    assert list(_unequal(ours)) == []
    found = failures(_unequal([*ours, Finding(True, "", figures=other, where="c")]))
    assert found == ["gpus: 8 on a, b; 4 on c", "torch: 2.13.0 on a, b; 2.12.1 on c"]


def test_versions_of_this_node_are_figures(tmp_path: Path) -> None:
    [found] = versions.run(context(tmp_path))
    assert found.figures["torch"] == torch.__version__
    assert {"python", "deepspeed"} <= {*found.figures}


def test_a_slice_a_gpu_with_fewer_nvlinks_little_lockable_memory_and_no_ninja_are_named(
    root: Path, see: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nvlink_problems("GPU 0: NVIDIA T4 (UUID: GPU-0)\n") == (0, [])
    see("GPU-a", "GPU-b", modes=MODES.replace("\n", "\\n"), nvlink=NVLINK.replace("\n", "\\n").replace("\t", "\\t"))
    device = root / "sys/class/infiniband/mlx5_0"
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, limits[1]))
    try:
        assert failures(machine.run(context(root), root=root)) == [
            "GPU 0 is divided into MIG slices",
            "GPU 1 has 2 of 3 NVLinks",
        ]
        device.mkdir(parents=True)
        monkeypatch.setenv("PATH", str(root / "bin"))
        assert failures(machine.run(context(root), root=root))[2:] == [
            "ulimit -l is 0 MB, and this node has InfiniBand",
            "ninja: there is no ninja",
        ]
        texts = [each.text for each in machine.run(context(root), root=root) if each.passed is None]
        assert texts == ["GPU 1 has persistence mode off: starts take seconds longer (nvidia-smi -pm 1 as root)"]
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


def test_node_checks_are_those_of_the_config(tmp_path: Path, tokens: Path) -> None:
    terms = {"min_shm_mb": 1e9, "payload_mb": 1}
    path = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", launch={"node_checks": terms}))
    (tmp_path / "work").mkdir()
    found = list(nodes.run(context(tmp_path / "work", config=path)))
    [text] = failures(iter(found))
    assert text.startswith("/dev/shm has ")
    assert "1e+06 are wanted" in text
    assert next(each.text for each in found if each.passed is None) == "gpu errors: there is no nvidia-smi"
    healthy = context(tmp_path / "work", config=path, overrides=("launch.node_checks.min_shm_mb=1",))
    *_, last = nodes.run(healthy)
    assert (last.passed, last.figures["devices"]) == (True, 0)


def test_no_compiler_no_header_a_failing_one_and_wrong_numbers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> list[str]:
        return failures(compilers.run(context(tmp_path)))

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # restored in the end
    monkeypatch.delenv("CXX", raising=False)
    with monkeypatch.context() as broken:
        broken.setenv("PATH", str(tmp_path))
        assert found() == ["inductor compiles C++ for a CPU, and there is no g++"]
    with monkeypatch.context() as broken:
        broken.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
        assert found() == [f"code of inductor includes Python.h, which is not in {tmp_path}"]
    monkeypatch.setattr(torch, "compile", lambda call, **_: lambda values: call(values).neg())
    assert found() == ["a C++ kernel of Inductor computes wrong numbers"]
    monkeypatch.setattr(torch, "compile", lambda *_, **__: subprocess.run(["false"], check=True))
    [failed] = found()
    assert failed.startswith("Inductor cannot compile a C++ kernel: Command '['false']' returned")


@pytest.fixture
def small_shm(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MB in the place of /dev/shm."""
    path = tmp_path / "shm"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], check=False)
    if made.returncode:
        pytest.skip("mounting a tmpfs takes root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_shm_a_full_disk_and_absent_data_are_found_before_the_first_save(
    tmp_path: Path, tokens: Path, small_shm: Path
) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    copies = f"run.in_memory_checkpoints={small_shm}"
    assert [each.passed for each in config.run(context(tmp_path, config=path))] == [True, True]
    [full] = failures(config.run(context(tmp_path, config=path, overrides=(copies,))))
    assert full.startswith(f"run.in_memory_checkpoints = {small_shm} has 0.001")
    [disk] = failures(config.run(context(tmp_path, config=path, overrides=(f"run.dir={small_shm}/run",))))
    assert disk.startswith(f"run.dir = {small_shm}/run has")
    with pytest.raises(DataError):
        list(config.run(context(tmp_path, config=path, overrides=('data.sources=[{"path": "absent"}]',))))
    assert not (tmp_path / "run").exists()
    [none] = config.run(context(tmp_path))
    assert none.passed is None
