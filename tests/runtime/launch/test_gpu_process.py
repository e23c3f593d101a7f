"""What a process sets up for its GPU: device, LOCAL_RANK, NCCL, allocator, flight recorder, cores beside the GPU.

The environment and sysfs are made up here, since there is no GPU; what only hardware shows is marked `gpu`.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from foundation.errors import ConfigError
from foundation.gpu_drivers import refuse_unusable_gpu
from pipeline.config.sections.run import LaunchSection
from pipeline.engines.build import pick_device
from pipeline.runtime.launch import detect, group
from pipeline.runtime.launch import device as device_module
from pipeline.runtime.launch.device import (
    bind_beside,
    bind_to_gpu,
    cores_beside,
    has_gpu,
    pci_address,
    set_up_allocator,
)
from pipeline.runtime.launch.environment import SINGLE_PROCESS
from pipeline.runtime.launch.gpu_environment import (
    allocator_defaults,
    compiler_defaults,
    flight_recorder_defaults,
    host_group_defaults,
)
from tests import warm
from tests.conftest import ROOT
from tests.support import output_of

GPU = "0000:dc:00.0"


@pytest.fixture
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that this process sees so many GPUs."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)

    return see


@pytest.mark.parametrize(("visible", "local_rank"), [(1, "0"), (8, "3")])
def test_deepspeed_takes_the_gpu_of_an_mpirun_rank_whether_it_sees_one_or_all(
    monkeypatch: pytest.MonkeyPatch, fake_gpus: Any, visible: int, local_rank: str
) -> None:
    fake_gpus(visible)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("RANK", 3), ("SIZE", 8), ("LOCAL_RANK", 3), ("LOCAL_SIZE", 8)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    launch = detect()
    device = pick_device(launch)
    assert device == torch.device("cuda", int(local_rank))
    for name, value in group._torchrun_variables(launch, device.index).items():
        monkeypatch.setenv(name, value)
    engine = SimpleNamespace()
    DeepSpeedEngine._configure_with_arguments(engine, None, None)  # asserts that both local ranks are equal
    assert engine.local_rank == device.index
    assert detect().rank == 3


@pytest.mark.parametrize(
    ("backend", "gpu", "ranks", "device"),
    [
        ("cpu:gloo,cuda:nccl", 1, 2, torch.device("cuda", 1)),
        ("cpu:gloo,cuda:nccl", 0, 1, None),
        ("cpu:gloo,cuda:gloo", 0, 2, None),
        ("gloo", None, 2, None),
    ],
)
def test_nccl_is_given_its_device_so_that_groups_are_split_from_one(
    monkeypatch: pytest.MonkeyPatch, backend: str, gpu: int | None, ranks: int, device: torch.device | None
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda _backend, **arguments: given.update(arguments))
    rendezvous = SimpleNamespace(timeout_s=60.0, rank=0, world_size=ranks)
    monkeypatch.setattr(group, "deadline", lambda *_, **__: open(os.devnull))  # noqa: SIM115, PTH123  any context
    group._connect(backend, rendezvous, None, gpu=gpu)
    assert given["device_id"] == device


DRIVERS = {
    "535.183.01": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n",
    "570.124.06": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs)\n",
    "580.65.06": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)\n",
}


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file system without a driver, under a torch built for CUDA 13.0."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in [name for name in os.environ if name.startswith("SLURM_") or name.endswith("VISIBLE_DEVICES")]:
        monkeypatch.delenv(name)
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    return tmp_path


def install_driver(root: Path, version: str) -> None:
    (root / "proc/driver/nvidia/version").write_text(DRIVERS[version])


@pytest.mark.parametrize("version", ["535.183.01", "570.124.06"])
def test_a_driver_too_old_for_torch_is_refused_with_both_versions_and_what_to_install(root: Path, version: str) -> None:
    install_driver(root, version)
    with pytest.raises(ConfigError, match=f"driver is {version}, and CUDA 13.0 needs 580 or newer") as refused:
        refuse_unusable_gpu(torch, key="launch.device", root=root)
    assert "whl/cu126; launch.device=cpu trains on the CPU" in refused.value.remedy
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES= in the environment takes the CPU"):
        refuse_unusable_gpu(torch, root=root)


@pytest.mark.parametrize(
    ("variables", "files"),
    [
        ({}, ["proc/driver/nvidia/version"]),
        ({}, ["dev/nvidia0"]),
        ({"SLURM_GPUS_ON_NODE": "8"}, []),
        ({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, []),
    ],
)
def test_a_machine_that_promises_gpus_which_do_not_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, root: Path, variables: dict[str, str], files: list[str]
) -> None:
    for name in files:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(DRIVERS["580.65.06"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="nvidia-smi"):
        refuse_unusable_gpu(torch, key="launch.device", root=root)
    monkeypatch.setattr(torch.version, "cuda", None)  # a CPU build was chosen
    refuse_unusable_gpu(torch, key="launch.device", root=root)


@pytest.mark.parametrize(
    ("variables", "version"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, None),  # as DeepSpeed's launcher sets it
        ({"CUDA_VISIBLE_DEVICES": ""}, "535.183.01"),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, "580.65.06"),  # a container without GPUs on a host that has some
        ({"CUDA_VISIBLE_DEVICES": "-1", "SLURM_GPUS_ON_NODE": "8"}, None),
        ({"SLURM_GPUS_ON_NODE": "0"}, None),
    ],
)
def test_the_cpu_is_taken_where_no_gpu_is_promised_or_all_are_hidden(
    monkeypatch: pytest.MonkeyPatch, root: Path, variables: dict[str, str], version: str | None
) -> None:
    if version:
        install_driver(root, version)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refuse_unusable_gpu(torch, key="launch.device", root=root)


@pytest.mark.parametrize(("number", "refused"), [(errno.EPERM, False), (errno.EACCES, True)])
def test_a_job_whose_control_group_denies_it_the_gpus_of_its_host_takes_the_cpu(
    monkeypatch: pytest.MonkeyPatch, root: Path, number: int, refused: bool
) -> None:
    install_driver(root, "580.65.06")
    (root / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (root / "dev" / name).touch()

    def deny(path: Path, _flags: int) -> int:
        assert path.name != "nvidiactl"  # which every job may open
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(ConfigError) if refused else nullcontext():
        refuse_unusable_gpu(torch, key="launch.device", root=root)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    with pytest.raises(ConfigError):
        refuse_unusable_gpu(torch, key="launch.device", root=root)


def test_a_command_without_the_key_names_the_variable_that_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str | None] = []
    monkeypatch.setattr(device_module, "refuse_unusable_gpu", lambda _torch, *, key: keys.append(key))
    assert pick_device(SINGLE_PROCESS) == pick_device(SINGLE_PROCESS, LaunchSection()) == torch.device("cpu")
    assert keys == [None, "launch.device"]


def test_launch_device_cpu_hides_gpus_from_libraries_or_says_that_it_is_too_late(
    monkeypatch: pytest.MonkeyPatch, fake_gpus: Any
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.environ["CUDA_VISIBLE_DEVICES"] != "")
    assert not has_gpu(LaunchSection(device="cpu"))
    fake_gpus(1)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES= in the environment"):
        has_gpu(LaunchSection(device="cpu"))


@pytest.mark.integration
@pytest.mark.parametrize("gpus", ["", pytest.param("2", marks=pytest.mark.sweep)])
def test_deepspeeds_launcher_starts_a_cuda_build_on_a_machine_without_gpus_unless_slurm_gave_some(
    tmp_path: Path, gpus: str
) -> None:
    (tmp_path / "rank.py").write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.version.cuda = "13.0"  # a stand-in for the CUDA wheel
from foundation.cli import guarded, leave
from pipeline.config.sections.run import LaunchSection
from pipeline.engines.build import pick_device
from pipeline.runtime.launch import detect
def main():
    print("rank", os.environ["CUDA_VISIBLE_DEVICES"], pick_device(detect(), LaunchSection()), flush=True)
    return 0
leave(guarded(main))
""")
    launcher = str(Path(sys.executable).parent / "deepspeed")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        [launcher, "--num_accelerators", "2", "rank.py"],
        cwd=tmp_path,
        env=environ | {"SLURM_GPUS_ON_NODE": gpus},
        capture_output=True,
        text=True,
        check=False,
    )
    if gpus:
        assert done.returncode == 2, done.stderr
        assert "SLURM_GPUS_ON_NODE=2" in done.stderr
    else:
        assert done.stdout.count("rank 0,1 cpu") == 2, done.stderr


def test_torchs_own_settings_are_set_unless_the_user_has() -> None:
    assert allocator_defaults({}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocator_defaults({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:256"}) == {}
    recorder = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert flight_recorder_defaults({}) == recorder
    user = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert flight_recorder_defaults(user) == {}
    assert host_group_defaults({}) == {"TORCH_GLOO_LAZY_INIT": "1"}
    assert host_group_defaults({"TORCH_GLOO_LAZY_INIT": "0"}) == {}


@pytest.mark.sweep
def test_gloo_beside_nccl_opens_no_connection_between_ranks_that_never_send(tmp_path: Path) -> None:
    code = """
import os, sys, torch.distributed as dist
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 8)
before = len(os.listdir("/proc/self/fd"))
dist.init_process_group("gloo", rank=rank, world_size=8, store=store)
print(len(os.listdir("/proc/self/fd")) - before)
"""
    command = [sys.executable, "-c", code]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            env=os.environ | host_group_defaults({}),
        )
        for rank in range(8)
    ]
    opened = [int(rank.communicate(timeout=120)[0]) for rank in ranks]
    assert max(opened) < 7, opened


def test_the_allocators_setting_is_made_on_a_gpu_only_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    settings: Any = torch._C
    settings._accelerator_setAllocatorSettings("expandable_segments:False")  # as if torch had read no variable
    assert set_up_allocator(gpu=False) == []
    assert settings._accelerator_getAllocatorSettings() == "expandable_segments:False"
    [line] = set_up_allocator(gpu=True)
    assert line.startswith("PYTORCH_ALLOC_CONF=expandable_segments:True")
    assert settings._accelerator_getAllocatorSettings() == "expandable_segments:True"
    assert set_up_allocator(gpu=True) == []
    settings._accelerator_setAllocatorSettings("expandable_segments:False")  # torch's default, for other tests


def test_inductors_workers_are_a_ranks_share_of_the_cores_unless_the_user_has_set_them() -> None:
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    assert compiler_defaults({}, ranks=8, cores=208, allowed=104) == {name: "26"}
    assert compiler_defaults({}, ranks=8, cores=208, allowed=13) == {name: "13"}  # bound by the launcher
    assert compiler_defaults({}, ranks=1, cores=208, allowed=208) == {name: "32"}
    assert compiler_defaults({}, ranks=8, cores=4, allowed=4) == {name: "1"}
    assert compiler_defaults({name: "5"}, ranks=8, cores=208, allowed=208) == {}


def test_ranks_of_one_host_share_its_cores_also_if_inductor_was_imported_before() -> None:
    code = """
import os, torch._inductor.config as inductor
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.group import process_group
os.cpu_count = lambda: 12
os.sched_getaffinity = lambda _process: set(range(12))
inductor.compile_threads = 12
with process_group(detect(), gpu=None, timeout_s=60.0) as rendezvous:
    print("workers", rendezvous.ranks_here, inductor.compile_threads, os.environ["TORCHINDUCTOR_COMPILE_THREADS"])
"""
    said = output_of(warm.run("-c", code, processes=2, merged=True))
    assert said.count("workers 2 6 6") == 2, said


def sysfs(root: Path, node: str, cores: str = "0-1,8") -> Path:
    """Files of a system whose GPU is on a node with these cores."""
    (root / "bus/pci/devices" / GPU).mkdir(parents=True)
    (root / "bus/pci/devices" / GPU / "numa_node").write_text(f"{node}\n")
    (root / "devices/system/node/node1").mkdir(parents=True)
    (root / "devices/system/node/node1/cpulist").write_text(f"{cores}\n")
    return root


def bound(root: Path, allowed: set[int]) -> tuple[str | None, list[frozenset[int]]]:
    """The line, and what the process would be bound to."""
    calls: list[frozenset[int]] = []
    return bind_beside(GPU, sysfs=root, allowed=lambda: allowed, bind=calls.append), calls


def test_a_rank_is_bound_to_the_cores_beside_its_gpu_within_those_its_launcher_left(tmp_path: Path) -> None:
    root = sysfs(tmp_path, "1")
    assert pci_address(domain=0, bus=0xDC, device=0) == GPU
    assert cores_beside(GPU, sysfs=root) == (1, frozenset({0, 1, 8}))
    line, calls = bound(root, {1, 2, 3, 8})
    assert calls == [frozenset({1, 8})]
    assert line == f"bound to the 2 cores of NUMA node 1, beside the GPU {GPU}"


@pytest.mark.parametrize("allowed", [{4, 5}, {0, 1}])
def test_a_rank_that_its_launcher_has_bound_stays_so(tmp_path: Path, allowed: set[int]) -> None:
    assert bound(sysfs(tmp_path, "1"), allowed) == (None, [])


@pytest.mark.parametrize(("node", "cores"), [("-1", "0-1"), ("7", "0-1"), ("none", "0-1"), ("1", "all")])
def test_a_rank_is_not_bound_where_the_system_does_not_tell_the_cores(tmp_path: Path, node: str, cores: str) -> None:
    assert bound(sysfs(tmp_path, node, cores), {0, 1, 2}) == (None, [])
    assert bind_to_gpu(0, LaunchSection(numa_bind=False)) == []
    assert bind_to_gpu(None, LaunchSection()) == []


def test_all_threads_of_a_process_are_bound(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    code = f"""
import os, threading
from pathlib import Path
from pipeline.runtime.launch.device import bind_beside
done = threading.Event()
before = threading.Thread(target=done.wait, daemon=True)
before.start()
mine = min(os.sched_getaffinity(0))
root = Path({str(tmp_path)!r})
(root / "devices/system/node/node1/cpulist").write_text(str(mine))
assert bind_beside({GPU!r}, sysfs=root).startswith("bound to the 1 cores")
threads = [int(each.name) for each in Path("/proc/self/task").iterdir()]
assert len(threads) > 1
assert all(os.sched_getaffinity(thread) == {{mine}} for thread in threads)
"""
    sysfs(tmp_path, "1")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu_only
def test_segments_of_the_allocator_are_expandable_and_the_gpu_has_an_address() -> None:
    code = """
import json, torch
from pipeline.runtime.launch.device import set_up_allocator, bind_to_gpu
from pipeline.config.sections.run import LaunchSection
said = set_up_allocator(gpu=torch.cuda.is_available())
torch.cuda.set_device(0)
bind_to_gpu(0, LaunchSection())
kept = torch.ones(64 << 20, device="cuda")
print(json.dumps([said, [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]]))
"""
    environ = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environ, capture_output=True)
    said, expandable = json.loads(done.stdout)
    assert len(said) == 1
    assert expandable
    assert all(expandable)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_groups_are_split_and_their_collectives_recorded() -> None:
    code = """
import torch, torch.distributed as dist
from pipeline.engines.build import pick_device
from pipeline.runtime.faults.flight_recorder import _traces
from pipeline.runtime.launch import detect, process_group
from pipeline.engines.parallel.mesh import Mesh
from pipeline.config.topology import Topology
launch = detect()
device = pick_device(launch)
with process_group(launch, gpu=device.index):
    mesh = Mesh(Topology(cp=2), device_type="cuda")
    values = torch.ones(4, device=device)
    for group in (mesh.group("cp"), mesh.stage_group()):
        dist.all_reduce(values, group=group)
    assert values.tolist() == [4.0] * 4
    torch.cuda.synchronize()
    world = dist.group.WORLD
    assert world.bound_device_id == device
    assert world._get_backend(device).comm_split_count() > 0
    names = [entry["profiling_name"] for trace in _traces() for entry in trace["entries"]]
    assert "nccl:all_reduce" in names, names
"""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*torchrun, "--no-python", sys.executable, "-c", code], check=True, cwd=ROOT)
