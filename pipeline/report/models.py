"""The table of models: the metrics of each, their format, and how they are measured. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich import box
from rich.table import Table
from rich.text import Text

from headrace.base.directory import MANIFEST, read_manifest
from pipeline.evaluation.data import HeldOutData
from pipeline.evaluation.measure import measure
from pipeline.evaluation.model_folder import ModelFolder
from pipeline.metrics.units import show_bits_per_byte
from pipeline.report.inputs import Model


@dataclass(frozen=True)
class Measured:
    """One model's row.

    Attributes:
        name: in the report.
        parameters: of the architecture; tied ones count once.
        weight_bytes: size of the safetensors files.
        loss_nats: mean held-out loss, nats per token.
        perplexity: exp(loss_nats).
        bits_per_byte: held-out loss in bits per UTF-8 byte of text; None with a loss mask.
        tokens: target tokens of the evaluation.
        tokens_per_second: of the evaluation.
        dtype: of the weights in memory during the evaluation.
        device: on which it was evaluated.
    """

    name: str
    parameters: int
    weight_bytes: int
    loss_nats: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    tokens_per_second: float
    dtype: str
    device: str

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk per parameter."""
        return 8 * self.weight_bytes / self.parameters


@dataclass(frozen=True)
class Column:
    """A column of the table: heading, unit, format of a value, and one sentence on how it is measured."""

    head: str
    unit: str
    show: Callable[[Measured], str]
    how: str


COLUMNS = (
    Column("parameters", "", lambda m: f"{m.parameters:,}", "All weights of the architecture; tied ones count once."),
    Column(
        "weights",
        "MB",
        lambda m: f"{m.weight_bytes / 1e6:,.2f}",
        "Size of the safetensors files on disk in 10⁶ bytes, headers and scales included.",
    ),
    Column(
        "weights", "bits each", lambda m: f"{m.bits_per_weight:.2f}", "That size in bits, divided by the parameters."
    ),
    Column(
        "loss",
        "nats per token",
        lambda m: f"{m.loss_nats:.4f}",
        "Mean cross-entropy over the held-out tokens, each given those before it in its window.",
    ),
    Column(
        "perplexity",
        "",
        lambda m: f"{m.perplexity:,.2f}",
        "exp(loss). Depends on the tokenizer: compare models with the same tokenizer only.",
    ),
    Column(
        "loss",
        "bits per byte",
        lambda m: show_bits_per_byte(m.bits_per_byte),
        "The loss per UTF-8 byte of the held-out text: comparable between tokenizers.",
    ),
    Column(
        "scoring",
        "tokens/s",
        lambda m: f"{m.tokens_per_second:,.0f}",
        "Forward pass and loss of whole windows after a warmup, with quantized weights dequantized: not the speed of"
        " generation, nor of low-bit kernels.",
    ),
)


TABLE_WIDTH = 80
"""Characters; names of more than 8 are wrapped."""


def measure_model(model: Model, data: HeldOutData) -> Measured:
    """Evaluates a model in a subprocess.

    Raises:
        DataError: it cannot be loaded, or its perplexity is not finite.
    """
    result = measure(model.folder.path, data)
    keys = ("loss_nats", "perplexity", "bits_per_byte", "tokens", "tokens_per_second", "dtype", "device")
    numbers = {key: result[key] for key in keys}
    return Measured(model.name, count_parameters(model.folder), model.folder.weight_bytes, **numbers)


def count_parameters(folder: ModelFolder) -> int:
    """Number of parameters from the manifest, the headers, or, for a quantized model without one, the architecture."""
    if (folder.path / MANIFEST).is_file():
        recorded = read_manifest(folder.path, kind="model").details.get("parameters")
        if recorded is not None:
            return int(recorded)
    if folder.quantized_by is None:
        return folder.parameters
    from pipeline.evaluation.loading import empty_model  # noqa: PLC0415  (brings in torch)

    return sum(parameter.numel() for parameter in empty_model(folder.path).parameters())


def where(measured: Sequence[Measured]) -> str:
    """Device and dtype of the evaluation, e.g. "cpu, float32"; all of them if models differ."""
    return " / ".join(dict.fromkeys(f"{m.device}, {m.dtype}" for m in measured))


def scope(measured: Sequence[Measured], data: HeldOutData) -> str:
    """One line on the evaluated tokens."""
    counts = " / ".join(dict.fromkeys(f"{m.tokens:,}" for m in measured))
    return f"{counts} tokens of the {data.split} split of {data.path}, in windows of {data.sequence_length}"


def table(measured: Sequence[Measured], data: HeldOutData) -> Table:
    """The table for a terminal of at least `TABLE_WIDTH` columns: rich drops whole columns in a narrower one."""
    shown = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    shown.caption_justify = "left"
    shown.add_column("model", overflow="fold", min_width=min(8, max(len(one.name) for one in measured)))
    for column in COLUMNS:
        shown.add_column("\n".join([column.head, *wrap(column.unit, 8)]), justify="right", no_wrap=True)
    for one in measured:
        shown.add_row(Text(one.name), *(column.show(one) for column in COLUMNS))
    caption = f"scored: {scope(measured, data)}\ntokens/s: of the scoring, on {where(measured)}"
    shown.caption = Text(caption, overflow="fold")
    return shown
