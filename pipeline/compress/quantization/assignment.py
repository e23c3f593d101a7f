"""Schemes of a Hugging Face folder's layers, which may differ. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.compress.quantization.config import SCHEMES, Scheme

_EXPERT = re.compile(r"(.*\.experts)\.\d+\..*")
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""Projection -> the matrix product into which vLLM fuses it, which has one scheme (`packed_modules_mapping`)."""


@dataclass(frozen=True)
class LayerScheme:
    """The scheme of a layer.

    Attributes:
        name: a key of SCHEMES.
        group: number of weights that share a scale; None for one scale per output row.
    """

    name: str
    group: int | None

    @property
    def what(self) -> Scheme:
        """The entry of SCHEMES: bits, kind, activations."""
        return SCHEMES[self.name]

    def stored_bytes(self, shape: tuple[int, int], *, scale_bytes: int) -> int:
        """Bytes of a weight [O, I] in the file: integers, scales, and if they are packed, the shape as two int64."""
        outputs, inputs = shape
        packed = not self.what.activations
        row = -(-inputs * self.what.bits // 32) * 4 if packed else inputs
        return outputs * (row + inputs // (self.group or inputs) * scale_bytes) + 16 * packed


def unit_of(layer: str) -> str:
    """Name of the unit of a layer: layers that vLLM fuses (q, k, v; gate, up; all experts) share a scheme."""
    expert = _EXPERT.fullmatch(layer)
    if expert:
        return expert[1]
    module, _, leaf = layer.rpartition(".")
    return f"{module}.{_FUSED[leaf]}" if leaf in _FUSED else layer


def units_of(layers: Iterable[str]) -> dict[str, list[str]]:
    """Groups layers by unit: unit -> its layers, in their order."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        found.setdefault(unit_of(layer), []).append(layer)
    return found


def groups_of(layers: Mapping[str, LayerScheme]) -> dict[LayerScheme, list[str]]:
    """Groups layers by scheme, the scheme of most layers first."""
    found: dict[LayerScheme, list[str]] = {}
    for name, scheme in layers.items():
        found.setdefault(scheme, []).append(name)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))
