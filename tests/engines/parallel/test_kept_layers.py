"""`model.keep_layers`: a model of some layers computes what the original does whose other layers do nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foundation.errors import ConfigError
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.kept_layers import check_kept_layers
from pipeline.models.layers import keep_layers, original_name
from tests.engines.parallel.allocations import AllocationRecorder
from tests.models.architectures import assert_same, batch_of, gradients, plain_decoder
from tests.models.architectures import family_config as config_of

KEPT = [0, 2, 3]
BIG_V = 512
"""Large enough that the logits of a batch are by far the largest tensor: 2 x 24 x 512, while the head is 32 x 512."""


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("smollm3", {}),  # every fourth layer has no RoPE
        ("bert", {}),  # its parameters are of encoder.layer.N
        ("qwen2_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"mlp_only_layers": [0, 3]}),
        ("deepseek_v3", {"first_k_dense_replace": 3}),
        ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": 2}),
        *((kind, {}) for kind in ("llama", "gpt2", "gemma3_text", "llama4_text", "qwen3_next", "gpt_neo", "bamba")),
    ],
)
def test_kept_layers_compute_what_they_compute_in_the_original(kind: str, fields: dict[str, Any]) -> None:
    check_kept_layers(config_of(kind, **fields), KEPT)


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "computes other logits"),
        ("diffllama", {}, "computes other logits"),
        ("minicpm3", {}, "computes other logits"),  # residuals are divided by the number of layers
        ("jamba", {}, "fails"),  # every other layer has experts
        ("gemma3n_text", {}, "num_kv_shared_layers"),
    ],
)
def test_layers_that_depend_on_their_position_are_refused(kind: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.keep_layers = \[0, 2, 3\]\n(.|\n)*{why}"):
        check_kept_layers(config_of(kind, **fields), KEPT)


def test_layers_in_another_order_find_the_parameters_of_their_kind() -> None:
    check_kept_layers(config_of("qwen3_moe", mlp_only_layers=[0, 3]), [3, 2, 0])
    check_kept_layers(config_of("deepseek_v3", first_k_dense_replace=3), [0, 3, 2])
    with pytest.raises(ConfigError, match="may depend on their position"):
        check_kept_layers(config_of("deepseek_v3", first_k_dense_replace=3), [3, 2, 0])  # dense layers are the first


def test_what_a_config_says_of_layers_by_their_number_follows_them() -> None:
    small = keep_layers(config_of("qwen2_moe", decoder_sparse_step=2), KEPT)
    assert (small.decoder_sparse_step, small.mlp_only_layers) == (1, [0, 1])  # of 0 and 2; 1 and 3 have experts
    assert keep_layers(config_of("deepseek_v3", first_k_dense_replace=3), KEPT).first_k_dense_replace == 2
    assert keep_layers(config_of("smollm3"), KEPT).no_rope_layers == [1, 1, 0]
    assert keep_layers(config_of("xlstm"), KEPT).num_blocks == 3


def test_a_model_that_has_more_layers_than_are_kept_is_refused() -> None:
    rename = original_name(KEPT)
    assert rename("model.layers.2.norm.weight") == "model.layers.3.norm.weight"
    with pytest.raises(ConfigError, match=r"model.keep_layers = \[0, 2, 3\]\n.*still has model.layers.3.norm.weight"):
        rename("model.layers.3.norm.weight")


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
