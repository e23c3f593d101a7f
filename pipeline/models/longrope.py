"""Longrope and dynamic RoPE: the length of a sequence selects its frequencies, also where a rank sees a part of it.

transformers uses the long factors of longrope if the largest position of a forward pass exceeds
`original_max_position_embeddings` (`modeling_rope_utils.dynamic_rope_update`; likewise PhiMoE's scale of cosines), and
lowers the frequencies of dynamic RoPE (NTK) by that position beyond `max_position_embeddings`. But a context-parallel
rank has only some positions of a sequence, and a micro-batch of packed documents has many sequences. Here every
position gets the frequencies of its own sequence, which is its document if documents are masked. Unlike transformers'
dynamic RoPE, which keeps the frequencies of the longest sequence so far, they depend on nothing else.

Other types of RoPE do not depend on the length.

Shapes: B samples, T positions of this rank, S of the full sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class SequenceLengths:
    """Sequence lengths for the next forward pass: one number for all positions, or int64 [B, T]."""

    value: int | Tensor = 0


def follow_sequence_lengths(model: nn.Module) -> SequenceLengths | None:
    """Makes longrope and dynamic RoPE depend on the lengths set in the result; None for a model without them."""
    modules = [module for module in model.modules() if _thresholds(module)]
    if not modules:
        return None
    hooked = [hook for hook in modules[0]._forward_hooks.values() if isinstance(hook, _Rotate)]
    if hooked:  # another decoder of the same model has done it
        return hooked[0].lengths
    lengths = SequenceLengths()
    for module in modules:
        module.register_forward_hook(_Rotate(lengths), with_kwargs=True)
    return lengths


def sequence_lengths(documents: Tensor, chunks: Sequence[range]) -> Tensor:
    """Returns the document's length for every position of this rank, int64 [B, T].

    Args:
        documents: [B, S], document index of every position, from 0 in each sample.
        chunks: this rank's positions of the sequence.
    """
    index = documents.long()
    counts = torch.zeros_like(index).scatter_add_(1, index, torch.ones_like(index))
    lengths = counts.gather(1, index)
    return torch.cat([lengths[:, each.start : each.stop] for each in chunks], dim=1)


def lengths_so_far(positions: Tensor, documents: Tensor | None) -> Tensor:
    """Returns each new token's document length so far, int64 [B, T], for sequences that are being continued.

    A length includes all new tokens of the document. Padding, which repeats the last position, does not count.

    Args:
        positions: int64 [B, T], positions of the new tokens in their documents.
        documents: [B, S], document index of all tokens so far; None for one document.
    """
    if documents is None:
        return (positions.amax(1, keepdim=True) + 1).expand_as(positions)
    index = documents.long()
    own = index[:, -positions.shape[1] :]
    return torch.zeros_like(index).scatter_reduce_(1, own, positions, "amax").gather(1, own) + 1


def _thresholds(module: nn.Module) -> dict[str | None, tuple[str, int]]:
    """Returns layer type (None for all) -> the kind, and its longest sequence with the original frequencies.

    {} for other kinds of RoPE than longrope and dynamic.
    """
    kinds = getattr(module, "rope_type", None)
    by_type = kinds if isinstance(kinds, dict) else {None: kinds}
    parameters: Any = getattr(getattr(module, "config", None), "rope_parameters", None)
    found: dict[str | None, tuple[str, int]] = {}
    for name, kind in by_type.items():
        if kind == "longrope":
            given = parameters if name is None else parameters[name]
            found[name] = (kind, given["original_max_position_embeddings"])
        elif kind == "dynamic":
            found[name] = (kind, int(module.original_max_seq_len))  # type: ignore[arg-type]
    return found


@dataclass(frozen=True)
class _Rotate:
    """Forward hook of a rotary embedding, which recomputes the output for the lengths of the sequences."""

    lengths: SequenceLengths

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = {**dict(zip(("x", "position_ids", "layer_type"), args, strict=False)), **kwargs}
        kind, threshold = _thresholds(module).get(given.get("layer_type"), (None, 0))
        length = self.lengths.value
        if kind is None:
            return output
        if kind == "dynamic":
            return _dynamic(module, given, length, threshold)
        if isinstance(length, int):
            return _rotated(module, given, longest=length - 1)
        long = (length > threshold)[..., None]
        positions = given["position_ids"]
        with_long = _rotated(module, given, longest=threshold)
        with_short = _rotated(module, {**given, "position_ids": positions.clamp(max=threshold - 1)}, longest=0)
        return tuple(torch.where(long, *pair) for pair in zip(with_long, with_short, strict=True))


def _dynamic(module: Any, given: dict[str, Any], length: int | Tensor, threshold: int) -> tuple[Tensor, ...]:
    """Computes cosines and sines of dynamic RoPE [B, T, d], for sequences of one length or of each position's own."""
    prefix = f"{given['layer_type']}_" if given.get("layer_type") is not None else ""

    def at(longest: int) -> tuple[Tensor, ...]:
        setattr(module, f"{prefix}max_seq_len_cached", threshold)  # forgets the sequences before
        module.register_buffer(f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False)
        return _rotated(module, {**given, "position_ids": given["position_ids"].clamp(max=longest)}, longest=longest)

    if isinstance(length, int):
        return at(length - 1)
    found = at(threshold - 1)
    for longer in length[length > threshold].unique().tolist():
        own = (length == longer)[..., None]
        found = tuple(torch.where(own, *pair) for pair in zip(at(longer - 1), found, strict=True))
    return found


def _rotated(module: nn.Module, given: dict[str, Any], *, longest: int) -> tuple[Tensor, ...]:
    """Computes cosines and sines [B, T, d] as in a sequence that also contains the position `longest`."""
    positions = given["position_ids"]
    last = positions.new_full((len(positions), 1), longest)
    outputs = module.forward(**{**given, "position_ids": torch.cat([positions, last], dim=1)})
    return tuple(each[..., :-1, :] for each in outputs)
