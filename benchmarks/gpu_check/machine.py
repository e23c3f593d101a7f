"""Describes the machine as JSON, in a separate process. `python -m benchmarks.gpu_check.machine RESULT.json`

Besides versions, it lists which features that the project uses the installed torch has, and how fast each backend of
scaled dot product attention is on the shape of a layer of Llama-8B.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.models.sdpa_order import describe_order, sdpa_order

PACKAGES = (
    "triton", "transformers", "accelerate", "deepspeed", "torchao", "numpy", "pydantic", "datasets", "liger-kernel",
    "kernels", "flash-attn",
)  # fmt: skip
FEATURES = {
    "torch.nn.attention.flex_attention.flex_attention": "document masks and sliding windows on a GPU",
    "torch.nn.attention.varlen.varlen_attn": "variable-length attention",
    "torch.nn.functional.linear_cross_entropy": "head and cross-entropy as one operation",
    "torch.nn.LinearCrossEntropyOptions": "options of that operation",
    "torch.distributed.fsdp.fully_shard": "FSDP2",
    "torch.distributed.tensor.experimental.context_parallel": "torch's own context parallelism",
    "torch.nn.functional.scaled_mm": "fp8 matrix products",
}


def main() -> None:
    """Writes the description."""
    Path(sys.argv[1]).write_text(json.dumps(described(), indent=1))


def described() -> dict[str, Any]:
    """All properties of the machine on which a figure depends."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    return {
        "device": torch.cuda.get_device_name(0) if cuda else "cpu",
        "devices": torch.cuda.device_count() if cuda else 0,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "capability": list(torch.cuda.get_device_capability(0)) if cuda else None,
        "driver": driver(),
        "cpu_cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "packages": {name: version(name) for name in PACKAGES},
        "torch_lacks": {name: use for name, use in FEATURES.items() if not has(name)},
        "sdpa_order": describe_order(sdpa_order(torch.cuda.get_device_capability(0))) if cuda else None,
        "sdpa_ms": {backend.name: sdpa(backend, device) for backend in backends()},
    }


def driver() -> str | None:
    """The driver's version, according to nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def version(name: str) -> str | None:
    """An installed package's version."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def has(path: str) -> bool:
    """Whether torch has a function or class with this dotted name."""
    module, _, name = path.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def backends() -> list[SDPBackend]:
    """The backends that this torch knows, except those that stand for an error or a choice."""
    names = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    return [getattr(SDPBackend, name) for name in names if hasattr(SDPBackend, name)]


def sdpa(backend: SDPBackend, device: torch.device) -> float | str:
    """Median milliseconds of causal attention with its gradients, bf16, 32 heads; or why it does not run."""
    cuda = device.type == "cuda"
    shape = (2, 32, 4096, 128) if cuda else (1, 2, 64, 16)
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def once() -> float:
        start = time.perf_counter()
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        out.backward(out.detach())
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    try:
        once()
        return 1e3 * statistics.median(once() for _ in range(10))
    except RuntimeError as error:
        return " ".join(str(error).split())[:120]


if __name__ == "__main__":
    main()
