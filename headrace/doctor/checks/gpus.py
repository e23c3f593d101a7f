"""Check of a node: driver against torch's CUDA, number of GPUs against what the machine promises, twins."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.gpu_drivers import driver_version, promised_gpus, refuse_unusable_gpu
from headrace.doctor.check import Context, Finding
from headrace.doctor.table import GPUS
from pipeline.cluster.node_checks.nvidia import twin_problems
from pipeline.config.load import load_config

_CPU = "a training would run on the CPU or stop in its first second"
_FEWER = "the run would be smaller than paid for, or refuse its layout"
_TWINS = "two ranks would compute on one GPU, and NCCL would refuse them without naming either"


def run(context: Context, *, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Compares what torch sees with what driver, Slurm and the ranks promise.

    Args:
        context: the check's context.
        root: directory below which the driver's files are searched.
        environ: environment variables.
    """
    if context.config is not None and load_config(context.config, context.overrides).launch.device == "cpu":
        yield Finding(None, "launch.device is cpu: the GPUs are not checked", figures={GPUS: 0})
        return
    import torch  # noqa: PLC0415  only in the check's process

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    promised, evidence = promised_gpus(root, environ)
    if not count:
        yield _without_gpu(torch, evidence, root)
        return
    figures: dict[str, float | int | str] = {GPUS: count, "gpu": torch.cuda.get_device_name(0)}
    if promised > count:
        text = f"torch sees {count} of the {promised} GPUs that {evidence} promises"
        remedy = "compare with nvidia-smi -L; a GPU that is missing there fell off the bus: reboot or replace the node"
        yield Finding(False, text, _FEWER, remedy, figures)
    elif context.processes > count:
        text = f"--nproc is {context.processes}, and this node has {count} GPUs"
        yield Finding(False, text, _TWINS, f"--nproc {count}", figures)
    else:
        yield Finding(True, f"torch {torch.__version__} uses {count} GPUs", figures=figures)
    for problem in twin_problems(str(torch.cuda.get_device_properties(index).uuid) for index in range(count)):
        yield Finding(False, problem, _TWINS, "give this machine or container each GPU once")


def _without_gpu(torch: Any, evidence: str, root: Path) -> Finding:
    try:
        refuse_unusable_gpu(torch, root=root)
    except ConfigError as error:
        return Finding(False, error.why, _CPU, error.remedy, {GPUS: 0})
    if evidence and not torch.version.hip:
        text = f"a GPU is expected here ({evidence}), but torch {torch.__version__} is built for the CPU alone"
        remedy = f"install torch for CUDA; the driver is {driver_version(root) or 'unknown'}"
        return Finding(False, text, _CPU, remedy, {GPUS: 0})
    return Finding(None, "needs a GPU, and this machine has none: the ranks run on the CPU", figures={GPUS: 0})
