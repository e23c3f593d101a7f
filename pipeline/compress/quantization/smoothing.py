"""Smoothing: moves factors per channel from the activations, whose outliers are hard to round, into the weights.

For a channel j of a layer's input, x_j w_j = (x_j / s_j)(s_j w_j): the weights that produce x_j are divided by s_j, and
the columns that read it are multiplied. The function stays the same, but other numbers are rounded together. Let a_j
measure |x_j| and m_j be the largest weight of column j, and s_j = a_j^alpha / m_j^(1 - alpha). At alpha 0.5 both sides
then have the size (a_j m_j)^(1/2). The division goes into a norm's weight (query, key, value; gate, up), into the rows
of the value projection (output projection) and of the up projection (down projection): no operation is added.

Sources: Xiao et al. 2023, SmoothQuant (arXiv:2211.10438), formula 4: a_j is the maximum, for rounded activations. Lin
et al. 2024, AWQ (arXiv:2306.00978): a_j is the mean of |x_j|, for weights alone.

Shapes: D model, I inputs of a layer, H heads, K key-value heads, F features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from pipeline.compress.quantization.families import Family

_READERS_OF_ATTENTION = ("q_proj", "k_proj", "v_proj")
_READERS_OF_MLP = ("gate_proj", "up_proj", "gate", "gate_up_proj", "w1", "w3")
"""Names of linear layers: `gate` is the router of a mixture of experts, `gate_up_proj` the parameter of all experts,
and w1 and w3 are gate and up of a Mixtral expert."""
_PAIRS_OF_MLP = (("up_proj", "down_proj"), ("w3", "w2"))


@dataclass(frozen=True)
class Smoother:
    """Smooths decoder layers.

    Attributes:
        alpha: strength: 0 equalizes the columns of weights, 1 the channels of activations.
        family: norms of the layer.
        maximum: whether activations are measured by their maximum rather than their mean.
    """

    alpha: float
    family: Family
    maximum: bool

    @contextmanager
    def observe(self, layer: nn.Module) -> Iterator[Callable[[], None]]:
        """Observes activations in the block; yields a function that then smooths the layer in place."""
        norms = [_Norm(norm, readers, self.family.offset) for norm, readers in norm_readers(layer, self.family)]
        points: list[_Norm | _Rows] = [*norms, *_rows(layer)]
        seen: list[_Measure] = [_Measure(self.maximum) for _ in points]
        handles = [point.attach(measure) for point, measure in zip(points, seen, strict=True)]

        def smooth() -> None:
            # rows of value and up projections first: the norms then see the final weights
            for point, measure in reversed(list(zip(points, seen, strict=True))):
                if measure.tokens:
                    point.fold(measure.value, self.alpha)

        try:
            yield smooth
        finally:
            for handle in handles:
                handle.remove()


class _Measure:
    """Accumulates the maximum or mean of |x| per channel, [I]."""

    def __init__(self, maximum: bool) -> None:
        self._maximum, self.tokens = maximum, 0
        self._sum = torch.zeros(())

    def add(self, inputs: Tensor) -> None:
        rows = inputs.reshape(-1, inputs.shape[-1]).abs().float()
        if not len(rows):
            return  # no token was routed to this expert
        if not self.tokens:
            self._sum = torch.zeros(rows.shape[1], device=rows.device)
        self._sum = torch.maximum(self._sum, rows.amax(0)) if self._maximum else self._sum + rows.sum(0)
        self.tokens += len(rows)

    @property
    def value(self) -> Tensor:
        return self._sum if self._maximum else self._sum / self.tokens


@dataclass(frozen=True)
class _Norm:
    """A norm and the weights [*, D] that read its output."""

    norm: nn.Module
    readers: tuple[Tensor, ...]
    offset: float

    def attach(self, measure: _Measure) -> torch.utils.hooks.RemovableHandle:
        return self.norm.register_forward_hook(lambda _module, _given, made: measure.add(made))

    def fold(self, activations: Tensor, alpha: float) -> None:
        columns = torch.stack([_largest(weight) for weight in self.readers]).amax(0)
        factors = _factors(activations, columns, alpha)
        weight = _tensor(self.norm, "weight")
        weight.copy_((weight + self.offset) / factors - self.offset)
        for reader in self.readers:
            reader.mul_(factors)


@dataclass(frozen=True)
class _Rows:
    """A linear layer and its reader: outputs are heads of `block` features, each repeated for its query heads."""

    writer: nn.Linear
    reader: nn.Linear
    block: int

    def attach(self, measure: _Measure) -> torch.utils.hooks.RemovableHandle:
        return self.reader.register_forward_pre_hook(lambda _module, given: measure.add(given[0]))

    def fold(self, activations: Tensor, alpha: float) -> None:
        # grouped-query attention: H / K consecutive query heads read the same F values
        def merged(inputs: Tensor) -> Tensor:
            return inputs.reshape(self.writer.out_features // self.block, -1, self.block).amax(1).flatten()

        factors = _factors(merged(activations), merged(_largest(self.reader.weight)), alpha)
        self.writer.weight.div_(factors[:, None])
        if self.writer.bias is not None:
            self.writer.bias.div_(factors)
        repeated = factors.reshape(-1, 1, self.block).expand(-1, self.reader.in_features // len(factors), self.block)
        self.reader.weight.mul_(repeated.reshape(-1))


def norm_readers(layer: nn.Module, family: Family) -> list[tuple[nn.Module, tuple[Tensor, ...]]]:
    """The norms of a decoder layer, each with all weights [*, D] that read its output."""
    found = []
    for name, parent, names in (
        (family.attention_norm, "self_attn", _READERS_OF_ATTENTION),
        (family.mlp_norm, "mlp", _READERS_OF_MLP),
    ):
        readers = tuple(_readers(layer.get_submodule(parent), names))
        found.append((layer.get_submodule(name), readers))
    return found


def attention_pairs(layer: nn.Module) -> Iterator[tuple[nn.Linear, nn.Linear, int]]:
    """Value and output projections of a decoder layer, and the features of a head."""
    for module in layer.modules():
        value, output = (dict(module.named_children()).get(name) for name in ("v_proj", "o_proj"))
        if isinstance(value, nn.Linear) and isinstance(output, nn.Linear):
            size = module.head_dim
            assert isinstance(size, int)
            yield value, output, size


def _readers(parent: nn.Module, names: tuple[str, ...]) -> Iterator[Tensor]:
    for path, parameter in parent.named_parameters():
        parts = path.removesuffix(".weight").split(".")
        if parts[-1] in names and parameter.ndim > 1:
            yield parameter


def _rows(layer: nn.Module) -> Iterator[_Rows]:
    yield from (_Rows(value, output, size) for value, output, size in attention_pairs(layer))
    for module, names in product(layer.modules(), _PAIRS_OF_MLP):
        up, down = (dict(module.named_children()).get(name) for name in names)
        if isinstance(up, nn.Linear) and isinstance(down, nn.Linear):
            yield _Rows(up, down, up.out_features)


def _largest(weight: Tensor) -> Tensor:
    """Largest |w| of every input, [I]; for experts [E, O, I], over all experts."""
    return weight.abs().reshape(-1, weight.shape[-1]).amax(0)


def _factors(activations: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Factors s [I] with a geometric mean of 1, so that norms keep their size; 1 for channels that are 0."""
    passes = (activations > 0) & (weights > 0)
    one = torch.ones_like(activations)
    logarithms = alpha * torch.where(passes, activations, one).log()
    logarithms = logarithms - (1 - alpha) * torch.where(passes, weights, one).log()
    mean = logarithms[passes].mean() if passes.any() else 0.0
    factors = (logarithms - mean).exp()
    return torch.where(passes, factors, one)


def _tensor(module: nn.Module, name: str) -> Tensor:
    found = getattr(module, name)
    assert isinstance(found, Tensor)
    return found
