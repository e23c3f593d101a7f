"""Check of a node: NVLink, persistence mode, memory that may be locked, ninja."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from headrace.doctor.check import Context, Finding
from pipeline.cluster.node_checks.nvidia import MODES_QUERY, command_output, mode_problems, nvlink_problems

_LOCKED_GB = 16.0
"""Memory that a rank may have to lock for InfiniBand and for page-locked buffers, in GB."""


def run(context: Context, *, root: Path = Path("/")) -> Iterator[Finding]:
    """Makes the checks.

    Args:
        context: the check's context; unused.
        root: directory below which the devices of InfiniBand are searched.
    """
    del context
    yield from _nvlink()
    yield from _persistence()
    yield _locked_memory(any((root / "sys/class/infiniband").glob("*")))
    yield _ninja()


def _nvlink() -> Iterator[Finding]:
    text, failure = command_output(["nvidia-smi", "nvlink", "--status"], timeout_s=20.0)
    if failure:
        yield Finding(None, f"NVLink needs an NVIDIA GPU: {failure}")
        return
    active, problems = nvlink_problems(text)
    for problem in problems:
        meaning = "every collective of this node waits for its slowest link"
        yield Finding(False, problem, meaning, "see nvidia-smi nvlink -e and dmesg; reset the GPUs, or leave it out")
    if not active:
        why = "right for one GPU and for PCIe cards; on an SXM board look at the service nvidia-fabricmanager"
        yield Finding(None, f"no NVLink is active: {why}")
    elif not problems:
        yield Finding(True, f"{active} NVLinks are active, equally many on each GPU")


def _persistence() -> Iterator[Finding]:
    command = ["nvidia-smi", f"--query-gpu={MODES_QUERY}", "--format=csv,noheader"]
    text, failure = command_output(command, timeout_s=20.0)
    if failure:
        yield Finding(None, f"persistence mode needs an NVIDIA GPU: {failure}")
        return
    off = [each for each in mode_problems(text) if "persistence" in each]
    # trainings run without it: each start takes seconds longer, and the driver forgets ECC counts in between
    texts = f"{'; '.join(off)}: starts take seconds longer (nvidia-smi -pm 1 as root)"
    yield Finding(None, texts) if off else Finding(True, "persistence mode is on")


def _locked_memory(infiniband: bool) -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    shown = "unlimited" if unlimited else f"{limit / 1e9:.3g} GB"
    if unlimited or limit / 1e9 >= _LOCKED_GB or not infiniband:
        more = "" if infiniband else "; there is no InfiniBand, which would need more"
        return Finding(True, f"ulimit -l is {shown}{'' if unlimited else more}")
    remedy = "memlock unlimited in /etc/security/limits.conf; LimitMEMLOCK=infinity for slurmd; --ulimit memlock=-1"
    meaning = "NCCL cannot register memory with InfiniBand: it fails, or falls back to slow TCP"
    return Finding(False, f"ulimit -l is {shown}, and this node has InfiniBand", meaning, remedy)


def _ninja() -> Finding:
    text, failure = command_output(["ninja", "--version"], timeout_s=10.0)
    if not failure:
        return Finding(True, f"ninja {text.strip()}")
    meaning = "DeepSpeed builds operators with it at the first start: bf16 and offload on the CPU, NVMe"
    return Finding(False, f"ninja: {failure}", meaning, "pip install ninja")
