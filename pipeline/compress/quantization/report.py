"""Report of a quantization: sizes and held-out metrics before and after, for the manifest and as a table. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from rich.table import Table

from foundation.directory import Details, Manifest
from pipeline.compress.quantization.rules import QuantizationPlan
from pipeline.evaluation.consumers.description import GGUF_FILE
from pipeline.evaluation.heldout.before_after import add_measured, changes, measured, scored_data, table_of
from pipeline.models.folder.model_folder import ModelFolder


@dataclass(frozen=True)
class Sizes:
    """Counts and sizes of a quantization's result.

    Attributes:
        weight_bytes: bytes of all weight files.
        layers: number of quantized matrices.
        parameters: number of elements of these matrices.
        packed_bytes: bytes of the quantized matrices on disk, with their scales and shapes.
    """

    weight_bytes: int
    layers: int
    parameters: int
    packed_bytes: int


def sizes(plan: QuantizationPlan, folder: Path) -> Sizes:
    """Counts and sizes of the result in a folder."""
    if plan.gguf is not None:
        quantized = plan.gguf.quantized
        packed = sum(tensor.stored_bytes for tensor in quantized)
        elements = sum(prod(tensor.shape) for tensor in quantized)
        return Sizes((folder / GGUF_FILE).stat().st_size, len(quantized), elements, packed)
    result = ModelFolder.open(folder)
    elements = sum(prod(shape) for shape in plan.layers.values())
    return Sizes(result.weight_bytes, len(plan.layers), elements, _packed_bytes(plan, result))


def details(plan: QuantizationPlan, written: Sizes, before: Details, after: Details) -> Details:
    """Details for the manifest: counts, sizes in bytes, and held-out metrics before and after.

    Args:
        plan: plan of the quantization.
        written: sizes of the result.
        before: metrics of the original, by `measure`.
        after: metrics of the result, by `measure`; for a GGUF file, which transformers does not run, dtype and device.
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
            "imatrix": plan.config.imatrix,
            "group_size": plan.config.group,
            "layers": written.layers,
            "parameters": written.parameters,
            "bits_per_quantized_weight": bits,
        },
        "before": {**measured(before), "bits_per_weight": 8 * plan.source.weight_bytes / parameters},
        "after": {
            **measured(after),
            "weight_bytes": written.weight_bytes,
            "bits_per_weight": 8 * written.weight_bytes / parameters,
        },
        "data": scored_data(before),
    }


def step_numbers(recorded: Details) -> Details:
    """A quantization's numbers for the lineage: settings, bytes and loss before and after, KL by consumer."""
    found = {**recorded["quantization"], **changes(recorded)}
    scored = recorded["consumers"].items()
    found["mean_kl"] = {name: each["mean_kl"] for name, each in scored if "mean_kl" in each}
    return {key: value for key, value in found.items() if value is not None}


def table(manifest: Manifest) -> Table:
    """A table with the columns before and after, from the manifest alone."""
    recorded = manifest.details
    parts = recorded["quantization"]
    shown = table_of(manifest, after=_scheme(parts, recorded["after"]))
    shown.add_row("parameters", f"{recorded['parameters']:,}", f"{recorded['parameters']:,}")
    bits = parts["bits_per_quantized_weight"]
    at = "" if bits is None else f" at {bits:.2f} bits"
    shown.add_row("of them quantized", "-", f"{parts['parameters']:,}{at}")
    add_measured(shown, recorded)
    return shown


def mixed_table(mixed: Details) -> Table:
    """A table of every unit's choice with its measured KL divergence and bytes; largest KL first."""
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


def _scheme(parts: Details, after: Details) -> str:
    name = parts.get("scheme") or parts["weights"]  # the key's name before 0.6
    if after["dtype"] == name:
        return f"GGUF, {name}" + (", imatrix" if parts.get("imatrix") else "")
    if name == "mixed":
        return f"mixed, rest {after['dtype']}"
    if parts.get("method", "rtn") != "rtn":
        name = f"{name} {parts['method']}"
    if parts.get("rotation"):
        name = f"{name} rotated"
    if parts.get("smoothing") is not None:
        name = f"{name} smoothed"
    return f"{name}, group {parts['group_size'] or 'row'}, rest {after['dtype']}"


def _packed_bytes(plan: QuantizationPlan, result: ModelFolder) -> int:
    """Bytes of the quantized weights: packed integers, scales, and the two integers of the shape."""
    return sum(info.bytes for name, info in result.tensors.items() if _is_packed(name, plan))


def _is_packed(name: str, plan: QuantizationPlan) -> bool:
    module, _, leaf = name.rpartition(".")
    return module in plan.layers and leaf != "bias"
