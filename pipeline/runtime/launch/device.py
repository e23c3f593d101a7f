"""Prepares a process for its GPU: detects it, sets the allocator, binds the process to the cores beside the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.gpu_drivers import refuse_unusable_gpu
from pipeline.config.sections.run import LaunchSection
from pipeline.runtime.launch.gpu_environment import allocator_defaults

SYSFS = Path("/sys")


def has_gpu(config: LaunchSection | None) -> bool:
    """Tells whether this process computes on a GPU; a broken GPU is an error and does not count as none.

    Args:
        config: the section `launch`; None for commands that have none.

    Raises:
        ConfigError: the GPU is unusable (`refuse_unusable_gpu`); or `launch.device` is cpu, too late to hide the GPUs.
    """
    import torch  # noqa: PLC0415  so that `detect` needs no torch

    if config is not None and config.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # libraries look for GPUs on their own
        if torch.cuda.is_available():
            why = "this process has found its GPUs already"
            raise ConfigError("launch.device", "cpu", why=why, remedy="set CUDA_VISIBLE_DEVICES= in the environment")
        return False
    if torch.cuda.is_available():
        return True
    refuse_unusable_gpu(torch, key=None if config is None else "launch.device")
    return False


def set_up_allocator(*, gpu: bool) -> list[str]:
    """Sets up the GPU's allocator, before it is used; returns a line for people if it did.

    The environment variable is for child processes; this process has imported torch, whose CUDA library has read the
    variable already (`CUDAAllocatorConfig::instance`, which the allocator's static initialization calls).
    """
    chosen = allocator_defaults(os.environ) if gpu else {}
    os.environ.update(chosen)
    if chosen:
        import torch  # noqa: PLC0415  so that `detect` needs no torch

        for settings in chosen.values():
            torch._C._accelerator_setAllocatorSettings(settings)
    return [f"{name}={value} (set {name} yourself to change it)" for name, value in chosen.items()]


def bind_to_gpu(index: int | None, config: LaunchSection) -> list[str]:
    """Binds this process to the cores beside its GPU, unless `launch.numa_bind` is false; returns a line if it did.

    Args:
        index: index of the GPU among those this process sees; None on the CPU.
        config: the section `launch`.
    """
    if index is None or not config.numa_bind:
        return []
    import torch  # noqa: PLC0415  so that `detect` needs no torch

    gpu: Any = torch.cuda.get_device_properties(index)
    address = pci_address(domain=gpu.pci_domain_id, bus=gpu.pci_bus_id, device=gpu.pci_device_id)
    bound = bind_beside(address)
    return [f"rank 0 is {bound}; likewise each rank"] if bound else []


def pci_address(*, domain: int, bus: int, device: int) -> str:
    """Formats a device's address as in sysfs, e.g. 0000:dc:00.0."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def cores_beside(address: str, *, sysfs: Path = SYSFS) -> tuple[int, frozenset[int]] | None:
    """Reads a PCI device's NUMA node and its cores; None if the system does not report them, as in many containers.

    Args:
        address: from `pci_address`.
        sysfs: root of sysfs.
    """
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        if node < 0:  # the firmware names no node
            return None
        return node, frozenset(_numbers((sysfs / f"devices/system/node/node{node}/cpulist").read_text()))
    except (OSError, ValueError):
        return None


def bind_beside(
    address: str,
    *,
    sysfs: Path = SYSFS,
    allowed: Callable[[], Iterable[int]] = lambda: os.sched_getaffinity(0),
    bind: Callable[[frozenset[int]], None] | None = None,
) -> str | None:
    """Binds this process to the cores beside a device, within its launcher's core set.

    A rank on another socket copies its batches and launches its kernels over the link between the sockets.

    Args:
        address: from `pci_address`.
        sysfs: root of sysfs.
        allowed: returns the cores this process may run on.
        bind: binds the process to cores; None binds all of its threads.

    Returns:
        The binding in words. None where nothing was bound: the NUMA node is unknown, the launcher has bound this
        process to another node's cores, or all its cores are on this node already.
    """
    found = cores_beside(address, sysfs=sysfs)
    if found is None:
        return None
    node, cores = found
    given = frozenset(allowed())
    if not given & cores or given <= cores:
        return None
    (bind or _bind_threads)(given & cores)
    return f"bound to the {len(given & cores)} cores of NUMA node {node}, beside the GPU {address}"


def _bind_threads(cores: frozenset[int]) -> None:
    """Binds all existing threads; later threads inherit the binding."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cores)


def _numbers(text: str) -> Iterable[int]:
    """Parses the numbers of a list such as "0-3,8,10-11"."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
