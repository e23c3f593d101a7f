"""Which tensor gets which type; and that every type rounds as much as is said, and no more."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize

from pipeline.models.gguf import libllama
from pipeline.models.gguf.types import BY_GGUF, FILE_TYPES, FLOATING_POINT, ROUNDING, fitting, more_bits, type_of
from pipeline.models.gguf.write import encoded


def test_a_mix_gives_the_head_and_some_projections_more_bits() -> None:
    mix = FILE_TYPES["Q4_K_M"]

    def of(name: str, *, tied: bool = False, shape: tuple[int, ...] = (512, 512)) -> Q:
        return type_of(name, shape, mix, layers=16, tied=tied)

    assert of("output.weight") is Q.Q6_K
    assert of("token_embd.weight") is Q.Q4_K
    assert of("token_embd.weight", tied=True) is Q.Q6_K
    assert of("blk.0.attn_v.weight") is Q.Q6_K
    assert of("blk.0.attn_q.weight") is Q.Q4_K
    assert of("blk.2.ffn_down.weight") is Q.Q4_K
    assert of("blk.4.ffn_down.weight") is Q.Q6_K
    assert of("blk.3.attn_norm.weight", shape=(512,)) is Q.F32
    assert of("blk.3.ffn_gate_inp.weight") is Q.F32


def test_the_first_and_last_eighth_and_every_third_layer_between_get_more_bits() -> None:
    assert [layer for layer in range(16) if more_bits(layer, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]


@pytest.mark.parametrize(
    ("wanted", "width", "given"),
    [
        (Q.Q4_K, 512, Q.Q4_K),
        (Q.Q4_K, 96, Q.Q5_0),  # no multiple of 256
        (Q.Q6_K, 96, Q.Q8_0),
        (Q.Q6_K, 100, Q.F16),  # no multiple of 32
        (Q.Q8_0, 100, Q.F16),
    ],
)
def test_rows_that_blocks_do_not_divide_fall_back(wanted: Q, width: int, given: Q) -> None:
    assert fitting(wanted, width) is given


@pytest.mark.parametrize("kind", sorted(set(ROUNDING) - {Q.F32}, key=int))
def test_a_type_rounds_normal_weights_by_a_third_of_its_bound_or_so(kind: Q) -> None:
    if kind not in BY_GGUF and not libllama.installed():
        pytest.skip("K-quants are computed by llama.cpp's library (pip install xllamacpp)")
    values = np.random.default_rng(0).standard_normal((16, 1024)).astype(np.float32)
    back = dequantize(encoded(values, kind), kind).reshape(values.shape)
    error = float(np.sqrt(np.mean(np.square(back - values))))
    assert 0.15 * ROUNDING[kind] < error < 0.5 * ROUNDING[kind]


def test_every_type_has_a_bound() -> None:
    used = {each for file in FILE_TYPES.values() for each in (file.base, file.more, file.head)}
    assert used <= set(ROUNDING)
    assert set(ROUNDING) >= FLOATING_POINT
