"""Check of a node: driver against torch's CUDA, number of GPUs against what the machine promises, MIG slices, twins."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.gpu_drivers import driver_version, promised_gpus, refuse_unusable_gpu
from headrace.doctor.check import Context, Finding
from headrace.doctor.table import GPUS
from pipeline.cluster.node_checks.nvidia import MODES_QUERY, command_output, mode_problems, twin_problems

_UUIDS = "uuids"
_CPU = "a training would run on the CPU or stop in its first second"
_TWINS = "two ranks would compute on one GPU, and NCCL would refuse them without naming either"


def run(context: Context, *, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Compares what torch sees with what driver, Slurm and the ranks promise.

    Args:
        context: the check's context.
        root: directory below which the driver's files are searched.
        environ: environment variables.
    """
    import torch  # noqa: PLC0415  only in the check's process

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    promised, evidence = promised_gpus(root, environ)
    if not count:
        yield from _without_gpu(torch, evidence, root)
        return
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    figures = {GPUS: count, "gpu": torch.cuda.get_device_name(0), _UUIDS: " ".join(uuids)}
    if promised > count:
        text = f"torch sees {count} of the {promised} GPUs that {evidence} promises"
        remedy = "compare with nvidia-smi -L; a GPU that is missing there fell off the bus: reboot or replace the node"
        yield Finding(False, text, "the run would be smaller than paid for, or refuse its layout", remedy, figures)
    elif context.processes > count:
        text = f"--nproc is {context.processes}, and this node has {count} GPUs"
        yield Finding(False, text, _TWINS, f"--nproc {count}", figures)
    else:
        yield Finding(True, f"torch {torch.__version__} uses {count} GPUs", figures=figures)
    for problem in twin_problems(uuids):
        yield Finding(False, problem, _TWINS, "give this machine or container each GPU once")
    yield from _mig()


def compare(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Compares the nodes: the same number of GPUs, and no GPU on two of them."""
    nodes = {each.where: each.figures for each in findings if GPUS in each.figures}
    usual = max((int(figures[GPUS]) for figures in nodes.values()), default=0)
    for node, figures in nodes.items():
        if int(figures[GPUS]) < usual:
            text = f"it has {figures[GPUS]} GPUs, and others have {usual}"
            meaning = "ranks of one job on different devices wait for each other, or are too few for the layout"
            yield Finding(False, text, meaning, "leave this node out, or get its GPUs back", where=node)
    shared = Counter(uuid for figures in nodes.values() for uuid in str(figures.get(_UUIDS, "")).split())
    for uuid in (uuid for uuid, times in shared.items() if times > 1):
        names = ", ".join(node for node, figures in nodes.items() if uuid in str(figures.get(_UUIDS, "")))
        yield Finding(
            False, f"one GPU, {uuid}, is on several nodes", _TWINS, "give each node its own GPUs", where=names
        )


def _without_gpu(torch: Any, evidence: str, root: Path) -> Iterator[Finding]:
    figures = {GPUS: 0}
    try:
        refuse_unusable_gpu(torch, root=root)
    except ConfigError as error:
        yield Finding(False, error.why, _CPU, error.remedy, figures)
        return
    if evidence and not torch.version.hip:
        text = f"a GPU is expected here ({evidence}), but torch {torch.__version__} is built for the CPU alone"
        remedy = f"install torch for CUDA; the driver is {driver_version(root) or 'unknown'}"
        yield Finding(False, text, _CPU, remedy, figures)
        return
    yield Finding(None, "needs a GPU, and this machine has none: the ranks run on the CPU", figures=figures)


def _mig() -> Iterator[Finding]:
    command = ["nvidia-smi", f"--query-gpu={MODES_QUERY}", "--format=csv,noheader"]
    text, failure = command_output(command, timeout_s=20.0)
    for problem in [each for each in mode_problems(text) if "MIG" in each]:
        meaning = "a slice has part of the memory and no NVLink, and a process sees only one of them"
        yield Finding(False, problem, meaning, "nvidia-smi -mig 0 as root while no process uses the GPU")
    if failure:
        yield Finding(None, f"MIG mode is unknown: {failure}")
