"""The rows of a comparison as tables for a terminal. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from pipeline.evaluation.comparison.rows import Row
from pipeline.runtime.metrics.perplexity import show_bits_per_byte

NOTHING = "-"


@dataclass(frozen=True)
class Column:
    """A column: heading, unit, a row's cell, and one sentence on how it is measured."""

    head: str
    unit: str
    show: Callable[[Row], str]
    how: str


def _shown(pattern: str, value: float | None) -> str:
    return NOTHING if value is None else pattern.format(value)


def _columns() -> tuple[Column, ...]:
    return (
        Column("consumer", "", lambda r: r.consumer, "The program that served the model for the figures of its row."),
        Column(
            "parameters",
            "millions",
            lambda r: _shown("{:,.2f}", None if r.parameters is None else r.parameters / 1e6),
            "All weights of the architecture; tied ones count once.",
        ),
        Column(
            "weights", "MB", lambda r: f"{r.bytes / 1e6:,.2f}", "Size of the files with weights on disk, in 10⁶ bytes."
        ),
        Column(
            "weights",
            "bits each",
            lambda r: _shown("{:.2f}", r.bits_per_weight),
            "Their size in bits, divided by the parameters: headers, scales and a GGUF file's tokenizer included.",
        ),
        Column(
            "loss",
            "nats/token",
            lambda r: _shown("{:.4f}", r.loss_nats),
            "Mean cross-entropy over the held-out tokens, each given those before it in its window.",
        ),
        Column(
            "perplexity",
            "",
            lambda r: _shown("{:,.2f}", r.perplexity),
            "exp(loss). Depends on the tokenizer: compare models with the same tokenizer only.",
        ),
        Column(
            "loss",
            "bits/byte",
            lambda r: show_bits_per_byte(r.bits_per_byte),
            "The loss per UTF-8 byte of the held-out text: comparable between tokenizers.",
        ),
        Column(
            "mean KL",
            "nats",
            lambda r: small(r.mean_kl),
            "Mean of KL(first model || this one) over positions of the same token ids. The first row is the reference.",
        ),
        Column("max KL", "nats", lambda r: small(r.max_kl), "Largest KL(first model || this one) of a position."),
        Column(
            "top-1",
            "same",
            lambda r: _shown("{:.1%}", r.top1_agreement),
            "Share of positions with the first model's likeliest token.",
        ),
    )


COLUMNS = _columns()


def small(value: float | None) -> str:
    """A KL divergence in a few characters: 0, 1.2e-05, 0.0031, 0.85."""
    if value is None or value == 0:
        return NOTHING if value is None else "0"
    return f"{value:.1e}" if value < 1e-3 else f"{value:.2g}"


def batches_of(rows: Sequence[Row]) -> list[int]:
    """Batch sizes of the rows' generation."""
    return sorted({each.batch for row in rows for each in row.generation})


def sources_of(rows: Sequence[Row]) -> list[str]:
    """Names of the sources whose loss is known."""
    return sorted({name for row in rows for name in row.sources})


def generation_columns(batches: Sequence[int]) -> list[Column]:
    """The consumer, and two columns for each batch size: generated tokens/s, and peak memory in MB."""

    def columns(batch: int) -> list[Column]:
        def rate(row: Row) -> str:
            made = row.generated(batch)
            return NOTHING if made is None else f"{made.tokens_per_second:,.0f}"

        def peak(row: Row) -> str:
            made = row.generated(batch)
            return NOTHING if made is None else f"{made.peak_bytes / 1e6:,.0f}"

        what = "one sequence" if batch == 1 else f"{batch} sequences at once"
        return [
            Column("generation", f"tokens/s, batch {batch}", rate, f"New tokens of {what} by greedy decoding, prompts"
                   " included, after a warmup, on the CPU."),
            Column("peak memory", f"MB, batch {batch}", peak, "Largest resident set of the process meanwhile, in 10⁶"
                   " bytes: weights, cache, and the libraries themselves."),
        ]  # fmt: skip

    return [COLUMNS[0], *(column for batch in batches for column in columns(batch))]


def source_columns(sources: Sequence[str]) -> list[Column]:
    """The consumer, and a column with the loss on each source."""

    def column(name: str) -> Column:
        return Column(
            name,
            "nats/token",
            lambda r: _shown("{:.4f}", r.sources.get(name)),
            f"The loss on the windows of source {name}.",
        )

    return [COLUMNS[0], *(column(name) for name in sources)]


def comparison_tables(rows: Sequence[Row], *, title: str = "Models side by side") -> list[Table]:
    """Makes the quality table and, where they were measured, tables of generation and sources."""
    tables = [_table(rows, COLUMNS, title=title)]
    batches, sources = batches_of(rows), sources_of(rows)
    if batches:
        tables.append(_table(rows, generation_columns(batches), title="Generation, and the largest resident set"))
    if len(sources) > 1:
        tables.append(_table(rows, source_columns(sources), title="Held-out loss by source"))
    absent = [f"{row.name} with {row.consumer} was not run: {row.not_run}" for row in rows if row.not_run is not None]
    versions = dict.fromkeys(f"{row.consumer} {row.version}" for row in rows if row.version)
    tables[0].caption = Text("\n".join([", ".join(versions), *absent]), overflow="fold")
    tables[0].caption_justify = "left"
    return tables


def _table(rows: Sequence[Row], columns: Sequence[Column], *, title: str) -> Table:
    shown = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, title_justify="left")
    shown.add_column("model", overflow="fold", min_width=min(16, max(5, *(len(row.name) for row in rows))))
    for column in columns:
        head = "\n".join([column.head, *column.unit.split(", ")])
        shown.add_column(head, justify="left" if column.head == "consumer" else "right", no_wrap=True)
    for row in rows:
        shown.add_row(Text(row.name), *(column.show(row) for column in columns))
    return shown
