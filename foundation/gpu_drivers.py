"""Signs that a machine has GPUs, to distinguish a machine with a broken GPU from one without a GPU."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError

_NVIDIA_VERSION = "proc/driver/nvidia/version"
_DRIVER_FILES = {"CUDA": (_NVIDIA_VERSION, "dev/nvidia0"), "ROCm": ("dev/kfd",)}
_DEVICES = {"CUDA": "nvidia[0-9]*", "ROCm": "kfd"}
_SLURM_GPUS = ("SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_NONE_VISIBLE = {"", "-1", "NoDevFiles", "void", "none"}
"""First entries of the variables in `_VISIBLE` that hide all GPUs. The third is Slurm's for a job without GPUs; the
last two are those of NVIDIA's container runtime, where the host's driver is visible all the same."""
_LEAST_DRIVER = {"CUDA 11": 450, "CUDA 12": 525, "CUDA 13": 580}
"""Major version of CUDA -> the oldest driver that runs it (NVIDIA's "Minor Version Compatibility", table 1)."""


def refuse_unusable_gpu(torch: Any, *, key: str | None = None, root: Path = Path("/")) -> None:
    """Refuses a machine with GPUs that torch cannot use; call it where torch finds no GPU.

    Args:
        torch: The module, which this package does not import.
        key: The config key that selects the CPU when set to cpu; None where only CUDA_VISIBLE_DEVICES does.
        root: The directory below which the driver's files are searched.

    Raises:
        ConfigError: torch is built for GPUs, and a driver or a Slurm job promises one; the message names driver and
            need.
    """
    cuda, hip = torch.version.cuda, torch.version.hip
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else ""
    promise = _gpu_evidence(built.partition(" ")[0], os.environ, root) if built else None
    if not promise:
        return
    try:
        torch.cuda.init()
        reason = "it counts none"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    why = f"a GPU is expected here ({promise}), but torch {torch.__version__} ({built}) can use none: {reason}"
    remedy = "look at what nvidia-smi or rocm-smi says on this host, and whether the job or container has its GPUs"
    version, needed = driver_version(root), _LEAST_DRIVER.get(built.partition(".")[0])
    if version and needed and int(version.partition(".")[0]) < needed:
        why += f"; the driver is {version}, and {built} needs {needed} or newer"
        remedy = (
            "install a newer driver, or torch for CUDA 12, which needs 525: pip install torch --index-url"
            " https://download.pytorch.org/whl/cu126"
        )
    if key is None:
        raise ConfigError("device", why=why, remedy=f"{remedy}; CUDA_VISIBLE_DEVICES= in the environment takes the CPU")
    raise ConfigError(key, "auto", why=why, remedy=f"{remedy}; {key}=cpu trains on the CPU")


def promised_gpus(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """The number of NVIDIA GPUs that this process should see, and the file or variable that promises them; 0 without.

    A variable such as CUDA_VISIBLE_DEVICES selects some of the GPUs: then its entries count.
    """
    evidence = _gpu_evidence("CUDA", environ, root)
    if evidence is None:
        return 0, ""
    if listed := [each for each in environ.get(_VISIBLE[0], "").split(",") if each.strip()]:
        return len(listed), f"{_VISIBLE[0]}={environ[_VISIBLE[0]]}"
    if (number := environ.get(_SLURM_GPUS[0], "")).isdecimal():
        return int(number), f"{_SLURM_GPUS[0]}={number}"
    devices = [path for path in (root / "dev").glob(_DEVICES["CUDA"]) if not _is_denied(path)]
    return (len(devices), "the files /dev/nvidia*") if devices else (1, evidence)


def _gpu_evidence(platform: str, environ: Mapping[str, str], root: Path) -> str | None:
    """The file or variable that promises this process GPUs; None without one.

    CUDA_VISIBLE_DEVICES does not count: DeepSpeed sets it on any machine.
    """
    if any(name in environ and environ[name].split(",")[0].strip() in _NONE_VISIBLE for name in _VISIBLE):
        return None
    devices = list((root / "dev").glob(_DEVICES[platform]))
    hidden = devices and all(map(_is_denied, devices))
    files = (f"/{name}" for name in _DRIVER_FILES[platform] if not hidden and (root / name).exists())
    variables = (f"{name}={environ[name]}" for name in _SLURM_GPUS if environ.get(name, "0") not in ("", "0"))
    return next(iter((*files, *variables)), None)


def _is_denied(device: Path) -> bool:
    """Whether this process's control group denies a device, as in a job without GPUs on a host with GPUs.

    The error is then EPERM. A user without permission for the file gets EACCES, which has to be reported.
    """
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        return error.errno == errno.EPERM
    return False


def driver_version(root: Path = Path("/")) -> str | None:
    """Version of NVIDIA's driver, e.g. 535.183.01; None without one."""
    try:
        found = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", (root / _NVIDIA_VERSION).read_text())
    except OSError:
        return None
    return found[1] if found else None
