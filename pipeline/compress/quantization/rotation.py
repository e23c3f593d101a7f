"""Rotation: multiplies the residual stream and attention's values by orthogonal matrices that spread outlier channels.

An RMS norm without weight commutes with an orthogonal matrix R. So norm weights are folded into the layers that read
them. Then the layers that read the residual stream are multiplied by R, and the layers that write into it by its
transpose. The function stays the same, and an outlier channel is spread over all channels. The values of every head are
rotated in the same way, between value and output projection. The served model has no additional operation.

R is a Hadamard matrix with random signs. Where the size is an odd number m times a power of 2, R is the Kronecker
product of a random orthogonal matrix of size m and a Hadamard matrix.
Source: Ashkboos et al. 2024, QuaRot (arXiv:2404.00456), section 4: the foldable rotations, without the online ones.

Shapes: D model, F features of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.compress.quantization.families import Family
from pipeline.compress.quantization.smoothing import attention_pairs, norm_readers

_WRITERS = ("o_proj", "down_proj", "w2")


def orthogonal(size: int, *, seed: int) -> Tensor:
    """Makes R, fp32 [size, size], from size and seed alone."""
    generator = torch.Generator().manual_seed(seed)
    odd = size
    while odd % 2 == 0:
        odd //= 2
    matrix: Tensor = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64)).Q
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    while len(matrix) < size:
        matrix = torch.kron(matrix.contiguous(), step)
    signs = torch.randint(2, (size, 1), generator=generator) * 2 - 1
    return (signs * matrix).float()


@dataclass(frozen=True)
class Rotation:
    """The rotation of a model. Create it with `Rotation.of`.

    Attributes:
        family: norms of the model.
        stream: R of the residual stream, [D, D].
    """

    family: Family
    stream: Tensor

    @classmethod
    def of(cls, model: Any, family: Family) -> Rotation:
        """Makes the rotation of a Hugging Face model, on any device."""
        return cls(family, orthogonal(model.config.get_text_config().hidden_size, seed=0))

    @torch.no_grad()
    def outside(self, model: Any) -> None:
        """Rotates embedding, last norm and head in place, except those on the meta device."""
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        norm = model.base_model.norm
        self._read((embedding.weight,))
        self._fold(norm, (head.weight,))
        self._read((head.weight,))

    @torch.no_grad()
    def layer(self, layer: nn.Module) -> None:
        """Rotates a decoder layer in place."""
        for norm, readers in norm_readers(layer, self.family):
            self._fold(norm, readers)
            self._read(readers)
        for value, output, features in attention_pairs(layer):
            _turn_heads(value, output, orthogonal(features, seed=1))
        for writer in _writers(layer):
            # weights [*, D, inputs] and biases [D]
            writer.copy_(self.stream.T @ writer)

    def _read(self, weights: tuple[Tensor, ...]) -> None:
        for weight in weights:
            if not weight.is_meta:
                weight.copy_(weight @ self.stream)

    def _fold(self, norm: nn.Module, readers: tuple[Tensor, ...]) -> None:
        weight = norm.weight
        assert isinstance(weight, Tensor)
        for reader in readers:
            if not reader.is_meta:
                reader.mul_(weight + self.family.offset)
        weight.fill_(1 - self.family.offset)


def _turn_heads(value: nn.Linear, output: nn.Linear, rotation: Tensor) -> None:
    features = len(rotation)
    rows = value.weight.reshape(-1, features, value.in_features)
    value.weight.copy_((rotation.T @ rows).reshape(value.weight.shape))
    if value.bias is not None:
        value.bias.copy_((value.bias.reshape(-1, features) @ rotation).flatten())
    columns = output.weight.reshape(output.out_features, -1, features)
    output.weight.copy_((columns @ rotation).reshape(output.weight.shape))


def _writers(layer: nn.Module) -> Iterator[Tensor]:
    for name, parameter in layer.named_parameters():
        parts = name.removesuffix(".weight").removesuffix(".bias").split(".")
        if parts[-1] in _WRITERS:
            yield parameter
