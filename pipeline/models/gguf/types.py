"""The types of GGUF files, and the type of each tensor in them. No torch.

A mixed type (e.g. Q4_K_M) gives some tensors more bits. Ours follows the intent of llama.cpp's `llama-quantize`. The
head, or an embedding that is also the head, has 6 bits. The next larger type is used for the value and down projections
in the first and last eighth of the layers and in every third layer between. Rows whose length is not a multiple of 256
cannot be K-quants: they get a type with blocks of 32, or F16 if the length is not a multiple of 32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

Q = GGMLQuantizationType

_FALLBACK = {Q.Q2_K: Q.Q4_0, Q.Q3_K: Q.Q4_0, Q.Q4_K: Q.Q5_0, Q.Q5_K: Q.Q5_1, Q.Q6_K: Q.Q8_0}
"""K-quant -> the type for rows whose length is not a multiple of 256."""

FLOATING_POINT = {Q.F32, Q.F16, Q.BF16}

ROUNDING = {
    Q.F32: 0.0, Q.F16: 1e-3, Q.BF16: 4e-3, Q.Q8_0: 0.02, Q.Q6_K: 0.05, Q.Q5_K: 0.1, Q.Q5_0: 0.1, Q.Q5_1: 0.1,
    Q.Q4_K: 0.2, Q.Q4_0: 0.25, Q.Q3_K: 0.4, Q.Q2_K: 0.7,
}  # fmt: skip
"""Largest RMS error allowed, as a fraction of the tensor's RMS: some three times the error of normal random weights
(measured: 0.005 Q8_0, 0.018 Q6_K, 0.036 Q5_K, 0.071 Q4_K, 0.086 Q4_0, 0.15 Q3_K, 0.30 Q2_K). The limit detects broken
tensors, not tensors that are hard to quantize."""

BY_GGUF = {Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q8_0}
"""Types that the package gguf computes; the others are computed by libllama."""


UNWEIGHTED = FLOATING_POINT | {Q.Q8_0}
"""Types without effect of an importance matrix: their scales depend only on the largest number of a block."""


@dataclass(frozen=True)
class FileType:
    """A type of GGUF file.

    Attributes:
        base: type of most matrices.
        more: type of the value and down projections of some layers.
        head: type of the head, or of an embedding that is the head.
        number: number of the type, which the file records (`general.file_type`).
    """

    base: GGMLQuantizationType
    more: GGMLQuantizationType
    head: GGMLQuantizationType
    number: LlamaFileType

    @property
    def needs_libllama(self) -> bool:
        """Whether the package gguf alone cannot write the type."""
        return not {self.base, self.more, self.head} <= BY_GGUF

    @property
    def weighted(self) -> bool:
        """Whether an importance matrix changes the file."""
        return self.base not in UNWEIGHTED


FILE_TYPES = {
    "F32": FileType(Q.F32, Q.F32, Q.F32, LlamaFileType.ALL_F32),
    "BF16": FileType(Q.BF16, Q.BF16, Q.BF16, LlamaFileType.MOSTLY_BF16),
    "F16": FileType(Q.F16, Q.F16, Q.F16, LlamaFileType.MOSTLY_F16),
    "Q8_0": FileType(Q.Q8_0, Q.Q8_0, Q.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "Q6_K": FileType(Q.Q6_K, Q.Q6_K, Q.Q6_K, LlamaFileType.MOSTLY_Q6_K),
    "Q5_K_M": FileType(Q.Q5_K, Q.Q6_K, Q.Q6_K, LlamaFileType.MOSTLY_Q5_K_M),
    "Q4_K_M": FileType(Q.Q4_K, Q.Q6_K, Q.Q6_K, LlamaFileType.MOSTLY_Q4_K_M),
    "Q4_0": FileType(Q.Q4_0, Q.Q4_0, Q.Q8_0, LlamaFileType.MOSTLY_Q4_0),
    "Q3_K_M": FileType(Q.Q3_K, Q.Q5_K, Q.Q6_K, LlamaFileType.MOSTLY_Q3_K_M),
    "Q2_K": FileType(Q.Q2_K, Q.Q4_K, Q.Q6_K, LlamaFileType.MOSTLY_Q2_K),
    # every tensor has its own type; before the choice, BF16
    "mixed": FileType(Q.BF16, Q.BF16, Q.BF16, LlamaFileType.GUESSED),
}
"""llama.cpp's name -> type of file."""

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_MORE = re.compile(r"blk\.(\d+)\.(attn_v|attn_qkv|ffn_down|ffn_down_exps)\.weight")
_FULL = re.compile(r"(_norm|ffn_gate_inp|position_embd|rope_freqs)\b")
"""Pattern of small tensors that are not rounded: norms, routers, positions and frequencies."""


def type_of(name: str, shape: tuple[int, ...], file_type: FileType, *, layers: int, tied: bool) -> GGMLQuantizationType:
    """Returns the type of one tensor.

    Args:
        name: name of the tensor in the file.
        shape: shape of the tensor; the last dim is the row.
        file_type: type of the file.
        layers: number of the model's layers.
        tied: whether the embedding is the head, too.
    """
    if len(shape) < 2 or _FULL.search(name):
        return Q.F32
    wanted = file_type.base
    found = _MORE.fullmatch(name)
    if name == _HEAD or (tied and name == _EMBEDDING):
        wanted = file_type.head
    elif found and more_bits(int(found[1]), layers):
        wanted = file_type.more
    return fitting(wanted, shape[-1])


def more_bits(layer: int, layers: int) -> bool:
    """Whether a layer's value and down projections get more bits."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def fitting(wanted: GGMLQuantizationType, width: int) -> GGMLQuantizationType:
    """Returns the type, or the nearest type whose blocks divide a row of `width`."""
    while width % GGML_QUANT_SIZES[wanted][0]:
        wanted = _FALLBACK.get(wanted, Q.F16)
    return wanted
