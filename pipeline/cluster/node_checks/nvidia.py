"""Errors of NVIDIA GPUs: ECC, row remapping, NVLink and MIG by nvidia-smi, Xid errors by the kernel's log.

Formats: `nvidia-smi --query-gpu` and `--query-remapped-rows` with `--format=csv,noheader,nounits`; values that a GPU
lacks are "[N/A]" or "[Not Supported]", and values of a lost GPU "[GPU is lost]" or "[Unknown Error]". The driver writes
"NVRM: Xid (PCI:0000:3b:00): 79, pid=..., GPU has fallen off the bus." into the kernel's log.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator

GPU_QUERY = "index,pci.bus_id,name,ecc.errors.uncorrected.volatile.total,retired_pages.pending"
MODES_QUERY = "index,uuid,persistence_mode,mig.mode.current,driver_version"
ROWS_QUERY = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"

FATAL_XIDS = {
    48: "double-bit ECC error",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    95: "uncontained memory error",
    119: "GSP timeout",
    120: "GSP error",
}
"""Xid errors of the hardware, after which a GPU has to be reset or replaced (NVIDIA's Xid catalog). Other Xid errors,
such as 13, 31 and 43, come from a program."""

RECENT_S = 86400.0
"""Age in seconds beyond which an Xid error does not count: the GPU has trained since, or was reset."""

_XID = re.compile(r"^\[\s*(\d+\.\d+)\].*NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_LOST = ("gpu is lost", "unknown error")


def gpu_problems(text: str) -> list[str]:
    """Lists the problems in the answer to `GPU_QUERY`, one text each."""
    found: list[str] = []
    for cells in _rows(text, 5):
        index, bus, _name, uncorrected, pending = cells
        if any(word in cell.lower() for cell in cells for word in _LOST):
            found.append(f"GPU {index} ({bus}) is lost")
        elif uncorrected.isdecimal() and int(uncorrected):
            found.append(f"GPU {index} ({bus}) has {uncorrected} uncorrected ECC errors since its driver was loaded")
        elif pending.lower() == "yes":
            found.append(f"GPU {index} ({bus}) has memory pages that a reset would retire")
    return found


def row_problems(text: str) -> list[str]:
    """Lists rows that could not be remapped, from the answer to `ROWS_QUERY`; pending remaps are harmless so far."""
    return [
        f"GPU {bus} has memory rows that could not be remapped"
        for bus, _pending, failure in _rows(text, 3)
        if failure.lower() == "yes" or (failure.isdecimal() and int(failure))
    ]


def mode_problems(text: str) -> list[str]:
    """Lists GPUs in MIG mode, and GPUs without persistence mode, from the answer to `MODES_QUERY`."""
    found = []
    for index, _uuid, persistence, mig, _driver in _rows(text, 5):
        if mig == "Enabled":
            found.append(f"GPU {index} is divided into MIG slices")
        if persistence == "Disabled":
            found.append(f"GPU {index} has persistence mode off")
    return found


def twin_problems(uuids: Iterable[str]) -> list[str]:
    """Lists UUIDs that several GPUs have, from the UUIDs in order."""
    found: dict[str, list[int]] = {}
    for index, uuid in enumerate(uuids):
        found.setdefault(uuid, []).append(index)
    return [f"GPUs {', '.join(map(str, each))} have one UUID, {uuid}" for uuid, each in found.items() if len(each) > 1]


def nvlink_problems(text: str) -> tuple[int, list[str]]:
    """Reads the answer to `nvidia-smi nvlink --status`.

    Returns:
        The number of active links of all GPUs; and GPUs with fewer active links than the GPU with most.
    """
    active: dict[str, int] = {}
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            active[match[1]] = 0
        elif active and re.match(r"\s+Link \d+: [\d.]+ GB/s", line):
            active[next(reversed(active))] += 1
    most = max(active.values(), default=0)
    problems = [f"GPU {gpu} has {count} of {most} NVLinks" for gpu, count in active.items() if count < most]
    return sum(active.values()), problems


def xid_problems(log: str, *, uptime_s: float) -> list[str]:
    """Lists recent hardware Xid errors in the kernel's log, as `dmesg` prints it (seconds since boot)."""
    found: dict[tuple[str, int], None] = {}
    for line in log.splitlines():
        match = _XID.match(line)
        if match and uptime_s - float(match[1]) <= RECENT_S and int(match[3]) in FATAL_XIDS:
            found[match[2], int(match[3])] = None
    return [f"GPU {bus} had Xid {number} ({FATAL_XIDS[number]})" for bus, number in found]


def command_output(command: list[str], *, timeout_s: float) -> tuple[str, str]:
    """Returns a command's output, and why there is none: the command is missing, failed, or did not end in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        return "", f"there is no {command[0]}"
    except subprocess.TimeoutExpired:
        return "", f"{command[0]} did not answer within {timeout_s:g} s"
    if done.returncode:
        return "", (done.stderr.strip() or done.stdout.strip() or f"{command[0]} ended with code {done.returncode}")
    return done.stdout, ""


def _rows(text: str, width: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == width:
            yield cells
