"""Records intermediate results of a decoder in a forward pass: hidden states, queries, keys and values.

Recorded tensors are part of the autograd graph, so that a loss on them trains earlier layers. Activation checkpointing
does not free them, and the recomputation in the backward pass records nothing.

Shapes: B samples, T positions of this rank, D features, H heads, K key/value heads, d head size; in a tensor-parallel
decoder hidden states [B, T / tp, D] and H / tp, K / tp heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from pipeline.data.micro_batch import MicroBatch
from pipeline.models.attention import RecordAttention
from pipeline.models.decoder_layers import decoder_layers


@dataclass(frozen=True)
class WantedFeatures:
    """Layers to record.

    Attributes:
        hidden: layers whose output is recorded.
        attention: layers whose queries, keys and values are recorded.
    """

    hidden: frozenset[int] = frozenset()
    attention: frozenset[int] = frozenset()


@dataclass
class Features:
    """The features of one forward pass.

    Attributes:
        hidden: layer -> its output, [B, T, D], before any final norm.
        attention: layer -> rotated queries [B, H, T, d], rotated keys [B, K, T, d], and values [B, K, T, d].
    """

    hidden: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)


@runtime_checkable
class FeatureLoss(Protocol):
    """An objective that also compares the student's features; the decoder calls it after the loss on the logits."""

    wanted: WantedFeatures
    """Layers of the student that are recorded."""

    def matched(self, features: Features, batch: MicroBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the loss to add to the total, and the detached parts to report after the logits' parts."""
        ...


class Recorded(Protocol):
    """The part of a decoder that is recorded."""

    causal: nn.Module
    record_attention: RecordAttention | None


@contextmanager
def recording(decoder: Recorded, wanted: WantedFeatures) -> Iterator[Features]:
    """Records features within a block; after several forward passes, those of the last."""
    features, layers = Features(), decoder_layers(decoder.causal)
    still = [True]

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        if still and layer in wanted.attention:
            features.attention[layer] = (query, key, value)

    hooks = [layers[index].register_forward_hook(_keep(features, index)) for index in sorted(wanted.hidden)]
    decoder.record_attention = attention if wanted.attention else None
    try:
        yield features
    finally:
        still.clear()  # a recomputation calls the hook again
        decoder.record_attention = None
        for hook in hooks:
            hook.remove()


def _keep(features: Features, index: int) -> Callable[..., None]:
    def hook(_layer: nn.Module, _inputs: Any, output: Any) -> None:
        features.hidden[index] = output[0] if isinstance(output, tuple) else output

    return hook
