"""FlashAttention: what is refused where its package, its GPU or 16 bits are missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers import GPTJConfig, LlamaConfig

from foundation.errors import ConfigError
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction.meta import build_meta
from pipeline.models.flash_attention import check_flash_attention, unfit
from pipeline.models.sdpa_order import ordered_sdpa, sdpa_order
from tests.conftest import ROOT
from tests.engines.layout_worker import resolved
from tests.support import output_of

VERSIONS = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
SETS = """
import pipeline.plan.fake_gpu.device, torch
from pipeline.models.sdpa_order import ordered_sdpa
before = torch._C._get_sdp_priority_order()
with ordered_sdpa(torch.device("cuda", 0)) as line:
    print(line)
    print(torch._C._get_sdp_priority_order()[:4])
assert torch._C._get_sdp_priority_order() == before
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_machine_without_a_gpu_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=f"{version}.*\n.*no GPU.*\n.*use sdpa"):
        check_flash_attention(version, torch.device("cpu"))
    check_flash_attention("sdpa", torch.device("cpu"))


def test_a_gpu_without_kernels_of_a_version_is_named_with_what_it_needs() -> None:
    needs = {(version, found): unfit(version, found, "this GPU") for version in VERSIONS for found in GPUS}
    assert {key for key, why in needs.items() if why is None} == {
        *(("flash_attention_2", found) for found in GPUS if found != (7, 5)),
        *(("flash_attention_3", found) for found in ((8, 0), (9, 0))),
        *(("flash_attention_4", found) for found in ((9, 0), (10, 0))),
    }
    why = needs["flash_attention_3", (10, 0)]
    assert why == "this GPU has compute capability 10.0, and flash_attention_3 needs 8.0 to 9.x"


GPUS = ((7, 5), (8, 0), (9, 0), (10, 0))


"""T4, A100, H100 and H200, B200."""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_missing_package_is_named_before_the_model_is_built(version: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    with pytest.raises(ConfigError, match=f"{version}.*\n.*doesn't seem to be installed(.|\n)*pip install flash-attn"):
        build_meta(LlamaConfig(**sizes), dtype=torch.bfloat16, attn_implementation=version)


def test_fp32_is_refused() -> None:
    model = {"model": {}, "bf16": {"enabled": False}}
    run = resolved(model, processes=1)  # the layout without it is legal
    assert run.config.model.attn_implementation == "sdpa"
    from pipeline.config.rules.layout import check_layout  # noqa: PLC0415

    section = run.config.model.model_copy(update={"attn_implementation": "flash_attention_3"})
    with pytest.raises(ConfigError, match="take 16-bit numbers"):
        check_layout(run.config.model_copy(update={"model": section}), run.topology)


def test_our_own_attention_is_called_as_the_config_calls_it() -> None:
    """A model without transformers' interface of attentions: the value that is refused is the one that was given."""
    with pytest.raises(ConfigError) as refused:
        build_meta(
            GPTJConfig(n_embd=32, n_layer=1, n_head=2, rotary_dim=8),
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
        )
    assert refused.value.value == "sdpa"
    assert refused.value.remedy.startswith("use eager")
    build_meta(
        GPTJConfig(n_embd=32, n_layer=1, n_head=2, rotary_dim=8), dtype=torch.float32, attn_implementation="eager"
    )


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
