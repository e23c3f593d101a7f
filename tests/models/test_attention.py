"""Our attention equals Hugging Face's; packed documents equal separate ones; FlashAttention is refused where unfit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers import GPTJConfig, LlamaConfig

from foundation.errors import ConfigError
from pipeline.engines.objective import CrossEntropy
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction import meta
from pipeline.models.construction.meta import build_meta
from pipeline.models.flash_attention import check_flash_attention, unfit
from pipeline.models.sdpa_order import ordered_sdpa, sdpa_order
from tests.conftest import ROOT
from tests.engines.layout_worker import resolved
from tests.models.architectures import T, assert_same, batch_of, gradients, plain_decoder, split_documents
from tests.support import output_of

ALL = ["llama", "llama_one_kv_head", "qwen3", "mistral", "gemma", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"]
ALL += ["phi3_longrope", "phimoe", "gemma2"]
BORDERS = ((4, 5, 11, 20), (9,))
FP32 = 1e-5
HEADS = 4
GRADIENT = 2 * T * HEADS * 2**-23
"""Relative to the largest value of a gradient: 2.3e-5. The gradient of a norm of queries or keys (Gemma 3, Qwen 3) is a
sum of a term for each of 2 samples x T tokens x 4 heads, with one rounding each. Against fp64, that of Gemma 3 is off
by 1.0e-5 with Hugging Face's eager attention and by 2.0e-5 with ours and its sdpa; those of other dense models by less
than 2e-6."""


@pytest.mark.integration
@pytest.mark.parametrize("theirs", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ALL)
def test_our_attention_equals_hugging_faces(name: str, theirs: str) -> None:
    for batch in (batch_of(), batch_of(borders=BORDERS)):
        ours, own = plain_decoder(name), plain_decoder(name, attention=theirs)
        found, expected = (d(batch.input_ids, batch, CrossEntropy())[0] for d in (ours, own))
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=FP32)
        found.backward()
        expected.backward()
        assert_same(gradients(ours), gradients(own), tolerance=GRADIENT)


@pytest.mark.parametrize("attention", ["headrace", "sdpa"])
@pytest.mark.parametrize("name", ALL)
def test_packed_documents_equal_separate_documents(name: str, attention: str) -> None:
    packed = batch_of(borders=BORDERS)
    decoder = plain_decoder(name, attention=attention)
    total = decoder(packed.input_ids, packed, CrossEntropy())[0]
    total.backward()
    packed_gradients = gradients(decoder)
    separate = sum((decoder(d.input_ids, d, CrossEntropy())[0] for d in split_documents(packed)), torch.zeros(()))
    assert float(total.detach()) == pytest.approx(float(separate.detach()), rel=FP32)
    separate.backward()
    assert_same(packed_gradients, gradients(decoder), tolerance=GRADIENT)


def test_document_masks_change_the_loss() -> None:
    packed, decoder = batch_of(borders=BORDERS), plain_decoder("llama")
    unmasked = type(packed)(packed.input_ids, packed.labels)
    masked, open_ = (float(decoder(b.input_ids, b, CrossEntropy())[0].detach()) for b in (packed, unmasked))
    assert abs(masked - open_) > 1e-3 * masked


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


def test_our_own_attention_is_called_as_the_config_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without transformers' interface of attentions: the value that is refused is the one that was given."""
    monkeypatch.setattr(meta, "is_adapted", lambda _: False)
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
