"""Report of a quantization: sizes and held-out metrics before and after, for the manifest and as a table. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.base.directory import Manifest
from pipeline.compress.rules import QuantizationPlan
from pipeline.consumers.description import GGUF_FILE
from pipeline.evaluation.model_folder import ModelFolder
from pipeline.metrics.units import show_bits_per_byte

_MEASURED = (
    "loss_nats",
    "perplexity",
    "bits_per_byte",
    "tokens",
    "tokens_per_second",
    "dtype",
    "device",
    "weight_bytes",
)


@dataclass(frozen=True)
class Sizes:
    """What a quantization has written.

    Attributes:
        weight_bytes: of all files with weights.
        layers: matrices that were quantized.
        parameters: elements of them.
        packed_bytes: of them on disk, with their scales and shapes.
    """

    weight_bytes: int
    layers: int
    parameters: int
    packed_bytes: int


def sizes(plan: QuantizationPlan, folder: Path) -> Sizes:
    """Of what was written into a folder."""
    if plan.gguf is not None:
        quantized = plan.gguf.quantized
        packed = sum(tensor.stored_bytes for tensor in quantized)
        elements = sum(prod(tensor.shape) for tensor in quantized)
        return Sizes((folder / GGUF_FILE).stat().st_size, len(quantized), elements, packed)
    result = ModelFolder.open(folder)
    elements = sum(prod(shape) for shape in plan.layers.values())
    return Sizes(result.weight_bytes, len(plan.layers), elements, _packed_bytes(plan, result))


def details(plan: QuantizationPlan, written: Sizes, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Details for the manifest: counts, sizes in bytes, and held-out metrics before and after.

    Args:
        plan: of the quantization.
        written: by it.
        before: of the original, by `measure`.
        after: of the result, by `measure`; of a GGUF file, which transformers does not run, its dtype and device.
    """
    parameters = plan.source.parameters
    bits = 8 * written.packed_bytes / written.parameters if written.parameters else None
    return {
        "parameters": parameters,
        "weight_bytes": written.weight_bytes,
        "quantization": {
            "scheme": plan.config.scheme,
            "method": plan.config.method,
            "smoothing": plan.config.smoothing,
            "rotation": plan.config.rotation,
            "group_size": plan.config.group,
            "layers": written.layers,
            "parameters": written.parameters,
            "bits_per_quantized_weight": bits,
        },
        "before": {**_measured(before), "bits_per_weight": 8 * plan.source.weight_bytes / parameters},
        "after": {
            **_measured(after),
            "weight_bytes": written.weight_bytes,
            "bits_per_weight": 8 * written.weight_bytes / parameters,
        },
        "data": {key: before[key] for key in ("data", "split", "sequence_length")},
    }


def step_numbers(recorded: dict[str, Any]) -> dict[str, Any]:
    """A quantization's numbers for the lineage: how it was done, bytes and loss before and after, KL by consumer."""
    before, after = recorded["before"], recorded["after"]
    found = {**recorded["quantization"]}
    for name, key in (("weight_bytes", "weight_bytes"), ("loss_nats", "loss_nats")):
        found |= {f"{name}_before": before.get(key), f"{name}_after": after.get(key)}
    scored = recorded["consumers"].items()
    found["mean_kl"] = {name: each["mean_kl"] for name, each in scored if "mean_kl" in each}
    return {key: value for key, value in found.items() if value is not None}


def table(manifest: Manifest) -> Table:
    """A table with the columns before and after, from the manifest alone."""
    recorded = manifest.details
    before, after, parts = recorded["before"], recorded["after"], recorded["quantization"]
    shown = Table(title=f"{manifest.config['model']} -> {manifest.config['output']}")
    shown.add_column("")
    shown.add_column(f"before ({before['dtype']})", justify="right")
    shown.add_column(f"after ({_scheme(parts, after)})", justify="right")
    shown.add_row("parameters", f"{recorded['parameters']:,}", f"{recorded['parameters']:,}")
    bits = parts["bits_per_quantized_weight"]
    at = "" if bits is None else f" at {bits:.2f} bits"
    shown.add_row("of them quantized", "-", f"{parts['parameters']:,}{at}")
    for name, (key, show) in _ROWS.items():
        shown.add_row(name, *(show(side[key]) if key in side else "-" for side in (before, after)))
    shown.caption = f"{recorded['data']['split']} split, {before['tokens']:,} tokens scored, on {before['device']}"
    return shown


def mixed_table(mixed: dict[str, Any]) -> Table:
    """What every unit has become, and the KL divergence that each choice was measured to cost; largest first."""
    caption = (
        f"{mixed['planned_bytes']:,} of {mixed['budget_bytes']:,} bytes; KL to the original when only this changes"
    )
    shown = Table(title="chosen within the budget", caption=caption)
    shown.add_column("layers")
    shown.add_column("became")
    shown.add_column("KL", justify="right")
    shown.add_column("bytes", justify="right")
    shown.add_column("KL at most", justify="right")
    for row in mixed["units"]:
        kl = f"{row['kl'].get(row['choice'], 0.0):.1e}"
        shown.add_row(row["unit"], row["choice"], kl, f"{row['bytes']:,}", f"{max(row['kl'].values()):.1e}")
    return shown


def _scheme(parts: dict[str, Any], after: dict[str, Any]) -> str:
    name = parts.get("scheme") or parts["weights"]  # the key before 0.6
    if after["dtype"] == name:
        return f"GGUF, {name}"
    if name == "mixed":
        return f"mixed, rest {after['dtype']}"
    if parts.get("method", "rtn") != "rtn":
        name = f"{name} {parts['method']}"
    if parts.get("rotation"):
        name = f"{name} rotated"
    if parts.get("smoothing") is not None:
        name = f"{name} smoothed"
    return f"{name}, group {parts['group_size'] or 'row'}, rest {after['dtype']}"


_ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "weights on disk": ("weight_bytes", lambda value: f"{value / 1e6:.2f} MB"),
    "bits per weight, all": ("bits_per_weight", lambda value: f"{value:.2f}"),
    "held-out loss, nats/token": ("loss_nats", lambda value: f"{value:.4f}"),
    "perplexity": ("perplexity", lambda value: f"{value:.3f}"),
    "bits per byte": ("bits_per_byte", show_bits_per_byte),
    "tokens/s": ("tokens_per_second", lambda value: f"{value:,.0f}"),
}
"""Row -> (key of a side, how its value is shown)."""


def _measured(side: dict[str, Any]) -> dict[str, Any]:
    return {key: side[key] for key in _MEASURED if key in side}


def _packed_bytes(plan: QuantizationPlan, result: ModelFolder) -> int:
    """Bytes of the quantized weights: packed integers, scales, and the two integers of the shape."""
    return sum(info.bytes for name, info in result.tensors.items() if _is_packed(name, plan))


def _is_packed(name: str, plan: QuantizationPlan) -> bool:
    module, _, leaf = name.rpartition(".")
    return module in plan.layers and leaf != "bias"
