"""Check of a node: MIG slices, NVLink, persistence mode, memory that may be locked, ninja."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from headrace.doctor.check import Context, Finding
from pipeline.cluster.node_checks.nvidia import MODES_QUERY, command_output, mode_problems, nvlink_problems

_LOCKED_GB = 16.0
"""Memory that a rank may have to lock for InfiniBand and for page-locked buffers, in GB."""
_MIG = "a slice has part of the memory and no NVLink, and a process sees only one of them"
_LINKS = "every collective of this node waits for its slowest link"
_LOCKED = "NCCL cannot register memory with InfiniBand: it fails, or falls back to slow TCP"
_BUILDS = "DeepSpeed builds operators with it at the first start: bf16 and offload on the CPU, NVMe"


def run(context: Context, *, root: Path = Path("/")) -> Iterator[Finding]:
    """Makes the checks.

    Args:
        context: the check's context; unused.
        root: directory below which the devices of InfiniBand are searched.
    """
    del context
    command = ["nvidia-smi", f"--query-gpu={MODES_QUERY}", "--format=csv,noheader"]
    modes, failure = command_output(command, timeout_s=20.0)
    if failure:
        yield Finding(None, f"MIG mode, NVLink and persistence mode need an NVIDIA GPU: {failure}")
    else:
        yield from _modes(modes)
        yield from _nvlink()
    yield _locked_memory(any((root / "sys/class/infiniband").glob("*")))
    text, failure = command_output(["ninja", "--version"], timeout_s=10.0)
    ninja = f"ninja: {failure or text.strip()}"
    yield Finding(False, ninja, _BUILDS, "pip install ninja") if failure else Finding(True, ninja)


def _modes(text: str) -> Iterator[Finding]:
    for problem in mode_problems(text):
        if "MIG" in problem:
            yield Finding(False, problem, _MIG, "nvidia-smi -mig 0 as root while no process uses the GPU")
        else:  # trainings run without it
            yield Finding(None, f"{problem}: starts take seconds longer (nvidia-smi -pm 1 as root)")


def _nvlink() -> Iterator[Finding]:
    active, problems = nvlink_problems(command_output(["nvidia-smi", "nvlink", "--status"], timeout_s=20.0)[0])
    for problem in problems:
        yield Finding(False, problem, _LINKS, "see dmesg and nvidia-smi nvlink -e; reset the GPUs, or leave it out")
    if not active:
        why = "right for one GPU and for PCIe cards; on an SXM board look at the service nvidia-fabricmanager"
        yield Finding(None, f"no NVLink is active: {why}")
    elif not problems:
        yield Finding(True, f"{active} NVLinks are active, equally many on each GPU")


def _locked_memory(infiniband: bool) -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    text = f"ulimit -l is {'unlimited' if unlimited else f'{limit / 1e6:,.0f} MB'}"
    if unlimited or limit / 1e9 >= _LOCKED_GB:
        return Finding(True, text)
    if not infiniband:
        return Finding(True, f"{text}; there is no InfiniBand, which would need more")
    remedy = "memlock unlimited in /etc/security/limits.conf; LimitMEMLOCK=infinity for slurmd; --ulimit memlock=-1"
    return Finding(False, f"{text}, and this node has InfiniBand", _LOCKED, remedy)
