"""Report of a quantization: sizes and held-out metrics before and after, for the manifest and as a table. No torch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from rich.table import Table

from headrace.base.directory import Manifest
from pipeline.compress.rules import QuantizationPlan
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


def details(
    plan: QuantizationPlan, result: ModelFolder, before: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    """Details for the manifest: counts, sizes in bytes, and held-out metrics before and after."""
    parameters, quantized = plan.source.parameters, sum(prod(shape) for shape in plan.layers.values())
    return {
        "parameters": parameters,
        "weight_bytes": result.weight_bytes,
        "quantization": {
            "weights": plan.config.weights,
            "group_size": plan.config.group,
            "layers": len(plan.layers),
            "parameters": quantized,
            "bits_per_quantized_weight": 8 * _packed_bytes(plan, result) / quantized,
        },
        "before": {**_measured(before), "bits_per_weight": 8 * plan.source.weight_bytes / parameters},
        "after": {**_measured(after), "bits_per_weight": 8 * result.weight_bytes / parameters},
        "data": {key: before[key] for key in ("data", "split", "sequence_length")},
    }


def table(manifest: Manifest) -> Table:
    """A table with the columns before and after, from the manifest alone."""
    recorded = manifest.details
    before, after, parts = recorded["before"], recorded["after"], recorded["quantization"]
    group = parts["group_size"] or "row"
    shown = Table(title=f"{manifest.config['model']} -> {manifest.config['output']}")
    shown.add_column("")
    shown.add_column(f"before ({before['dtype']})", justify="right")
    shown.add_column(f"after ({parts['weights']}, group {group}, rest {after['dtype']})", justify="right")
    shown.add_row("parameters", f"{recorded['parameters']:,}", f"{recorded['parameters']:,}")
    shown.add_row("of them quantized", "-", f"{parts['parameters']:,} at {parts['bits_per_quantized_weight']:.2f} bits")
    for name, show in _ROWS.items():
        shown.add_row(name, show(before), show(after))
    shown.caption = f"{recorded['data']['split']} split, {after['tokens']:,} tokens scored, on {after['device']}"
    return shown


_ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "weights on disk": lambda side: f"{side['weight_bytes'] / 1e6:.2f} MB",
    "bits per weight, all": lambda side: f"{side['bits_per_weight']:.2f}",
    "held-out loss, nats/token": lambda side: f"{side['loss_nats']:.4f}",
    "perplexity": lambda side: f"{side['perplexity']:.3f}",
    "bits per byte": lambda side: show_bits_per_byte(side["bits_per_byte"]),
    "tokens/s": lambda side: f"{side['tokens_per_second']:,.0f}",
}


def _measured(side: dict[str, Any]) -> dict[str, Any]:
    return {key: side[key] for key in _MEASURED}


def _packed_bytes(plan: QuantizationPlan, result: ModelFolder) -> int:
    """Bytes of the quantized weights: packed integers, scales, and the two integers of the shape."""
    return sum(info.bytes for name, info in result.tensors.items() if _is_packed(name, plan))


def _is_packed(name: str, plan: QuantizationPlan) -> bool:
    module, _, leaf = name.rpartition(".")
    return module in plan.layers and leaf != "bias"
