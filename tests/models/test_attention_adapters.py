"""Adapted attention, soft caps and sinks: losses and gradients are those of eager attention, documents are masked."""

from __future__ import annotations

import copy

import pytest
import torch

from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.activation_checkpointing import apply_activation_checkpointing
from pipeline.engines.parallel.decoder import Decoder, DecoderLayout, parameter_owners
from tests.engines.layout_worker import resolved
from tests.models.architectures import ADAPTED, assert_same, batch_of, gradients, plain_decoder, split_documents

BORDERS = ((4, 5, 11, 20), (9,))
FP32 = 1e-5
GRADIENT = 1e-4


@pytest.mark.parametrize("name", [*sorted(ADAPTED), "gemma2", "gpt_oss"])
def test_a_model_computes_what_its_own_code_computes_and_masks_documents(name: str) -> None:
    batch, packed = batch_of(), batch_of(borders=BORDERS)
    # transformers' eager Falcon adds its bias twice: in the mask and in the scores
    ours, own = plain_decoder(name), plain_decoder(name, attention="sdpa" if name == "falcon_alibi" else "eager")
    assert list(ours.parameters_by_name()) == list(own.parameters_by_name())
    separate = split_documents(packed)
    for theirs, mine in (([batch], batch), (separate, packed)):  # by their own code one document at a time
        expected = sum((own(each.input_ids, each, CrossEntropy())[0] for each in theirs), torch.zeros(()))
        found = ours(mine.input_ids, mine, CrossEntropy())[0]
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=FP32)
        found.backward()
        expected.backward()
        compared = [gradients(each) for each in (ours, own)]
        for each in compared:  # a bias of keys changes no softmax: its gradient is rounding
            for key in [key for key in each if key.endswith("k_proj.bias")]:
                del each[key]
        sinks = [each for key, each in compared[1].items() if key.endswith("sinks")]
        assert len(sinks) == (3 if name == "gpt_oss" else 0)
        assert all(each.abs().max() > 1e-4 for each in sinks)
        assert_same(*compared, tolerance=GRADIENT)


@pytest.mark.parametrize("name", ["bloom", "gpt_neo", "stablelm", "gemma2", "gpt_oss"])
def test_the_last_token_of_a_document_moves_nothing_in_the_next(name: str) -> None:
    decoder, batch = plain_decoder(name), batch_of(samples=1, borders=((9,),))
    changed = batch.input_ids.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 90
    unmasked = MicroBatch(batch.input_ids, batch.labels, batch.positions)
    with torch.no_grad():
        moved, open_ = (decoder.logits(changed, b) - decoder.logits(batch.input_ids, b) for b in (batch, unmasked))
    # the products of experts round differently with other tokens beside
    assert moved[:, 9:].abs().max() <= (1e-6 if name == "gpt_oss" else 0)
    assert min(moved[:, 8].abs().max(), open_[:, 9:].abs().max()) > 1e-3


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputed_layer_has_the_context_of_its_own_micro_batch(mode: str) -> None:
    """In a pipeline, the forward pass of another micro-batch comes before a backward pass."""
    first, second = batch_of(borders=BORDERS), batch_of(borders=((13,), (2, 17)))
    plain, decoder = plain_decoder("gptj"), plain_decoder("gptj")
    section = resolved({"memory": {"activation_checkpointing": mode}}, processes=1).config.memory
    apply_activation_checkpointing(decoder.causal, section)
    plain(first.input_ids, first, CrossEntropy())[0].backward()
    total = decoder.train()(first.input_ids, first, CrossEntropy())[0]
    decoder(second.input_ids, second, CrossEntropy())
    total.backward()
    assert_same(gradients(decoder), gradients(plain), tolerance=1e-6)


def test_a_copy_of_an_adapted_model_has_a_context_of_its_own() -> None:
    batch, decoder = batch_of(borders=BORDERS), plain_decoder("gptj")
    causal = copy.deepcopy(decoder.causal)
    copied = Decoder(causal, DecoderLayout(), parameter_owners(causal))
    with torch.no_grad():
        expected = decoder.logits(batch.input_ids, batch)
        copied.logits(batch.input_ids, batch_of(borders=((13,), (2, 17))))
        assert torch.equal(decoder.logits(batch.input_ids, batch), expected)
        assert torch.equal(copied.logits(batch.input_ids, batch), expected)
