"""Binds a rank to the cores of the NUMA node that its GPU is attached to. Linux only; no torch.

A rank on another socket copies its batches and launches its kernels over the link between the sockets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

SYSFS = Path("/sys")


def pci_address(*, domain: int, bus: int, device: int) -> str:
    """The address of a device as sysfs has it, e.g. 0000:dc:00.0."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def cores_beside(address: str, *, sysfs: Path = SYSFS) -> tuple[int, frozenset[int]] | None:
    """The NUMA node of a PCI device, and its cores; None where the system does not tell, as in many containers.

    Args:
        address: from `pci_address`.
        sysfs: root of sysfs.
    """
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        if node < 0:  # the firmware names none
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

    Args:
        address: from `pci_address`.
        sysfs: root of sysfs.
        allowed: returns the cores this process may run on.
        bind: binds it to cores; all of its threads when None.

    Returns:
        The binding in words; None where nothing was bound: the node is not known, the launcher has bound this process
        to cores of another node, or all cores it has are of this node already.
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
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def _numbers(text: str) -> Iterable[int]:
    """Numbers of a list such as "0-3,8,10-11"."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
