"""Checks of this node alone: device, GPU errors, memory, /dev/shm, disks, file system. Each is bounded in time."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundation.directory import existing_parent, free_bytes
from foundation.memory_size import available_memory
from pipeline.cluster.node_checks.nvidia import (
    GPU_QUERY,
    ROWS_QUERY,
    command_output,
    gpu_problems,
    row_problems,
    xid_problems,
)
from pipeline.config.sections.node_checks import NodeChecksSection

_SIDE = 256
_BYTES = 1 << 20


@dataclass
class Findings:
    """Findings of the checks, with the fields of `records.NodeRecord`."""

    devices: int | None = None
    problems: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def check_host(
    run_dir: Path, *, terms: NodeChecksSection, devices: int | None, tell: Callable[[str], None], deadline: float
) -> Findings:
    """Makes all checks of this node, one after the other.

    Args:
        run_dir: the run's directory, or where it will be made.
        terms: thresholds.
        devices: number of accelerators that the node has to have; None for any number.
        tell: called with the name of each check before it is made.
        deadline: end of the checks by `time.monotonic`; a check for which no time is left is skipped.
    """
    found = Findings()
    checks: dict[str, Callable[[Findings], None]] = {
        "memory": lambda f: _memory(f, terms.min_memory_gb),
        "shm": lambda f: _free(f, "shm", Path("/dev/shm"), terms.min_shm_mb / 1e3),
        "tmp": lambda f: _free(f, "tmp", Path(tempfile.gettempdir()), terms.min_tmp_gb),
        "disk": lambda f: _free(f, "disk", run_dir, terms.min_disk_gb),
        "file system": lambda f: _file_system(f, run_dir, terms.max_file_system_s),
        "gpu errors": _gpu_errors,
        "xid": _xid,
        "device": lambda f: _device(f, devices),
    }
    for name, check in checks.items():
        left = deadline - time.monotonic()
        if left <= 0:
            found.skipped[name] = "the checks before it took all the time"
            continue
        tell(name)
        _bounded(name, check, found, timeout_s=min(left, max(terms.max_file_system_s, terms.timeout / 2)))
    return found


def _bounded(name: str, check: Callable[[Findings], None], found: Findings, *, timeout_s: float) -> None:
    """Runs a check in a thread, which is abandoned if it hangs: a file system that is gone blocks forever."""
    own = Findings()

    def run() -> None:
        try:
            check(own)
        except Exception as error:  # a check that fails is reported, and the others go on
            own.problems[name] = f"{name}: {type(error).__name__}: {error}"

    thread = threading.Thread(target=run, name=f"check {name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        found.problems[name] = f"{name}: no answer within {timeout_s:.3g} s"
        return
    found.problems.update(own.problems)
    found.skipped.update(own.skipped)
    found.facts.update(own.facts)
    found.devices = own.devices if own.devices is not None else found.devices


def _memory(found: Findings, least_gb: float) -> None:
    free = available_memory(Path("/proc/meminfo").read_text()) / 1e9
    found.facts["memory_gb"] = round(free, 3)
    if free < least_gb:
        found.problems["memory"] = f"{free:.2f} GB of host memory are available, and {least_gb:g} are wanted"


def _free(found: Findings, name: str, directory: Path, least_gb: float) -> None:
    free = free_bytes(directory) / 1e9
    found.facts[f"{name}_gb"] = round(free, 3)
    if free < least_gb:
        found.problems[name] = f"{directory} has {free:.3f} GB of free space, and {least_gb:g} are wanted"


def _file_system(found: Findings, run_dir: Path, most_s: float) -> None:
    there = existing_parent(run_dir)
    path, content = there / f".node-check-{uuid.uuid4().hex}", os.urandom(_BYTES)
    began = time.monotonic()
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        same = path.read_bytes() == content
    finally:
        path.unlink(missing_ok=True)
    took = time.monotonic() - began
    found.facts["file_system_s"] = round(took, 4)
    if not same:
        found.problems["file system"] = f"{there} returns other bytes than were written"
    elif took > most_s:
        found.problems["file system"] = (
            f"{there} took {took:.1f} s to write, sync and read 1 MB, and {most_s:g} are allowed"
        )


def _gpu_errors(found: Findings) -> None:
    problems: list[str] = []
    for option, query, read in (("gpu", GPU_QUERY, gpu_problems), ("remapped-rows", ROWS_QUERY, row_problems)):
        command = ["nvidia-smi", f"--query-{option}={query}", "--format=csv,noheader,nounits"]
        text, failure = command_output(command, timeout_s=20.0)
        if failure.startswith("there is no"):
            found.skipped["gpu errors"] = failure
            return
        if failure and option == "gpu":
            problems.append(f"nvidia-smi: {failure}")
        problems += read(text)
    if problems:
        found.problems["gpu errors"] = "; ".join(problems)


def _xid(found: Findings) -> None:
    if "gpu errors" in found.skipped or not Path("/proc/driver/nvidia").exists():
        found.skipped["xid"] = "there is no NVIDIA driver"
        return
    text, failure = command_output(["dmesg"], timeout_s=10.0)
    if failure:
        found.skipped["xid"] = failure
        return
    problems = xid_problems(text, uptime_s=float(Path("/proc/uptime").read_text().split()[0]))
    if problems:
        found.problems["xid"] = "; ".join(problems)


def _device(found: Findings, wanted: int | None) -> None:
    """Counts the devices and multiplies small integer-valued matrices on each, whose product is exact."""
    import numpy as np  # noqa: PLC0415  torch takes seconds to import, and the other checks come first
    import torch  # noqa: PLC0415

    count = torch.cuda.device_count()
    found.devices, found.facts["devices"] = count, count
    if wanted is not None and count < wanted:
        found.problems["device"] = f"it has {count} devices, and {wanted} are wanted"
    i, k = np.indices((_SIDE, _SIDE))
    left, right = (i + k) % 7, (3 * i + k) % 5
    expected = left @ right  # int64, by numpy
    for device in [f"cuda:{number}" for number in range(count)] or ["cpu"]:
        began = time.monotonic()
        product = torch.tensor(left, dtype=torch.float32, device=device) @ torch.tensor(
            right, dtype=torch.float32, device=device
        )
        if not np.array_equal(product.cpu().numpy(), expected):
            found.problems["device"] = f"{device} multiplies matrices wrongly"
        found.facts[f"matmul_{device}_s"] = round(time.monotonic() - began, 4)
