"""The order of torch's attention kernels: stated, set for the process, and put back."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend

from pipeline.models.sdpa_order import ordered_sdpa, sdpa_order
from tests.conftest import ROOT
from tests.support import output_of

SETS = """
import pipeline.plan.fake_gpu.device, torch
from pipeline.models.sdpa_order import ordered_sdpa
before = torch._C._get_sdp_priority_order()
with ordered_sdpa(torch.device("cuda", 0)) as line:
    print(line)
    print(torch._C._get_sdp_priority_order()[:4])
assert torch._C._get_sdp_priority_order() == before
"""


def test_cudnn_is_first_from_hopper_on_and_flash_attention_before() -> None:
    assert sdpa_order((9, 0))[0] is sdpa_order((10, 0))[0] is SDPBackend.CUDNN_ATTENTION
    assert sdpa_order((8, 0))[0] is SDPBackend.FLASH_ATTENTION
    assert {len(set(sdpa_order(each))) for each in ((8, 0), (9, 0))} == {4}


def test_a_cpu_has_no_order() -> None:
    before = torch._C._get_sdp_priority_order()
    with ordered_sdpa(torch.device("cpu")) as line:
        assert line is None
        assert torch._C._get_sdp_priority_order() == before


@pytest.mark.integration
def test_the_order_is_set_within_and_named_for_people() -> None:
    said = output_of(
        subprocess.run([sys.executable, "-c", SETS], capture_output=True, text=True, check=False, cwd=ROOT)
    )
    line, order = said.strip().splitlines()
    assert "cuDNN, FlashAttention, memory-efficient, math" in line
    names = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    assert order == str([int(getattr(SDPBackend, name).value) for name in names])
