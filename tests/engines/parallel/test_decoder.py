"""Chunked loss: the same values as the unchunked loss, and the logits of the full sequence never exist."""

from __future__ import annotations

import pytest
import torch

from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.decoder import Decoder
from tests.engines.parallel.allocations import AllocationRecorder
from tests.models.architectures import assert_same, batch_of, gradients, plain_decoder

BIG_V = 512
"""Large enough that the logits of a batch are by far the largest tensor: 2 x 24 x 512, while the head is 32 x 512."""


def run(decoder: Decoder, batch: MicroBatch, z_loss: float = 0.01) -> tuple[torch.Tensor, ...]:
    sums: tuple[torch.Tensor, ...] = decoder(batch.input_ids, batch, CrossEntropy(z_loss=z_loss))
    sums[0].backward()
    return tuple(each.detach() for each in sums)


@pytest.mark.integration
@pytest.mark.parametrize("chunk", [1, 5, 12, 24, 1000])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma3_text", "gpt2"])
def test_the_chunked_loss_equals_the_unchunked_loss(name: str, chunk: int) -> None:
    batch = batch_of(borders=((4, 9), (12,)))
    unchunked, chunked = plain_decoder(name), plain_decoder(name, chunk=chunk)
    for found, expected in zip(run(chunked, batch), run(unchunked, batch), strict=True):
        assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert_same(gradients(chunked), gradients(unchunked))


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_with_a_chunked_loss_the_logits_of_a_full_sequence_never_exist(name: str) -> None:
    batch = batch_of()
    logits = batch.labels.numel() * BIG_V
    with AllocationRecorder() as recorder:
        run(plain_decoder(name, vocab_size=BIG_V), batch)
    assert recorder.largest >= logits
    with AllocationRecorder() as recorder:
        run(plain_decoder(name, vocab_size=BIG_V, chunk=4), batch)
    assert recorder.largest < logits


def test_with_a_chunked_loss_saved_activations_do_not_grow_with_positions_times_vocabulary() -> None:
    batch, saved = batch_of(samples=16), {}
    for chunk in (None, 4):
        decoder = plain_decoder("llama", vocab_size=BIG_V, chunk=chunk)
        with AllocationRecorder() as recorder:
            total = decoder(batch.input_ids, batch, CrossEntropy())[0]
            saved[chunk] = recorder.alive_bytes
        total.backward()
    logits_bytes = 4 * batch.labels.numel() * BIG_V
    # instead, the gradients of the head's weight and of its input are made in the forward pass
    gradient_bytes = 4 * 32 * (BIG_V + batch.labels.numel())
    assert saved[None] - saved[4] > 0.9 * logits_bytes - gradient_bytes > 0.7 * logits_bytes


def test_the_z_loss_follows_its_formula() -> None:
    batch, decoder = batch_of(), plain_decoder("llama")
    with torch.no_grad():
        total, nats, z = decoder(batch.input_ids, batch, CrossEntropy(z_loss=0.03))
        logits = decoder.causal(
            **{"input_ids": batch.input_ids, **decoder._attention_arguments(batch, batch.input_ids)}
        )
    squares = torch.logsumexp(logits.logits.double(), -1)[batch.labels >= 0].square().sum()
    assert float(z) == pytest.approx(0.03 * float(squares), rel=1e-5)
    assert float(total) == pytest.approx(float(nats) + float(z), rel=1e-6)
