"""Check of nodes: versions of Python, torch, CUDA, driver, NCCL and DeepSpeed, which have to be equal on all nodes."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from contextlib import suppress

from foundation.gpu_drivers import driver_version
from headrace.doctor.check import Context, Finding

_PACKAGES = ("torch", "triton", "deepspeed", "transformers", "numpy")


def run(context: Context) -> Iterator[Finding]:
    """Lists the versions of this node."""
    del context
    import torch  # noqa: PLC0415  only in the check's process

    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found |= {"cuda": torch.version.cuda, "rocm": torch.version.hip, "driver": driver_version()}
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    yield Finding(True, "versions", figures={name: version for name, version in found.items() if version})
