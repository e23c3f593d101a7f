"""The device of the GPU tests: a CUDA device, or the CPU where `make gpu-check` is rehearsed without one."""

from __future__ import annotations

import os

import pytest
import torch

ON_CPU = os.environ.get("HEADRACE_GPU_TESTS_ON") == "cpu"
"""Set by `python -m benchmarks.gpu --tiny`: tests that can run on a CPU do."""
DEVICE = torch.device("cpu") if ON_CPU else torch.device("cuda", 0)
CUDA = torch.cuda.is_available() and not ON_CPU
MARKS = [pytest.mark.gpu, pytest.mark.skipif(not (CUDA or ON_CPU), reason="needs a CUDA device")]
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """2-norm of the difference, relative to the norm of what is expected."""
    expected = expected.detach().float()
    return float((found.detach().float() - expected).norm() / expected.norm())
