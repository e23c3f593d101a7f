"""Our attention equals Hugging Face's, and packed documents give the results of separate documents."""

from __future__ import annotations

import pytest
import torch

from pipeline.engines.objective import CrossEntropy
from tests.models.architectures import T, assert_same, batch_of, gradients, plain_decoder, split_documents

ALL = ["llama", "llama_one_kv_head", "qwen3", "mistral", "gemma", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"]
ALL += ["phi3_longrope", "phimoe"]
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
