"""Rows of a comparison, one per model, and their JSON and CSV. No torch."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

HEADINGS = (
    *("model", "consumer", "version", "scheme", "parameters", "bytes", "bits_per_weight"),
    *("loss_nats", "perplexity", "bits_per_byte", "tokens", "mean_kl", "max_kl", "top1_agreement", "positions"),
    *("scoring_tokens_per_second", "dtype", "device", "threads", "not_run"),
)
"""Columns of the CSV, before the columns of each source and each batch size."""


@dataclass(frozen=True)
class Generated:
    """Generation by greedy decoding, at one batch size.

    Attributes:
        batch: number of sequences generated at once.
        prompt_tokens: prompt tokens of each sequence.
        new_tokens: generated tokens of each sequence.
        seconds: seconds for all sequences, prompts included, after a warmup.
        tokens_per_second: generated tokens per second, all sequences together.
        peak_bytes: largest resident set of the process meanwhile: weights, cache, and the libraries themselves.
        peak_of_batch: whether the peak belongs to this batch alone; else it is the peak since the process began.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    seconds: float
    tokens_per_second: float
    peak_bytes: int
    peak_of_batch: bool


@dataclass(frozen=True)
class Row:
    """A model served by one consumer. Figures that were not measured are None.

    Attributes:
        name: name given to the model.
        path: folder of the model.
        consumer: transformers, vllm or llama.cpp.
        scheme: W4A16, Q8_0, float32, ...
        bytes: size of the files with weights, in bytes.
        parameters: number of parameters of the architecture; tied parameters count once.
        not_run: why the consumer did not run, None when it did; every figure below is None then.
        version: version of the consumer.
        loss_nats: mean held-out loss, nats per token.
        perplexity: exp(loss_nats).
        bits_per_byte: held-out loss in bits per UTF-8 byte; None with a loss mask.
        tokens: number of tokens that the loss is the mean over.
        sources: source -> loss over its tokens, nats per token.
        mean_kl: mean KL(first model || this one) over `positions`, nats; 0 for the first model itself.
        max_kl: largest KL over `positions`, nats.
        top1_agreement: share of positions with the first model's likeliest token, 0 to 1.
        positions: number of positions whose distributions were compared, the same in all rows.
        generation: one entry for each batch size.
        samples: continuation of each prompt.
        scoring_tokens_per_second: tokens per second while the loss was computed.
        dtype: dtype in which transformers computed the loss.
        device: device on which the loss was computed.
        threads: number of CPU threads of scoring and generation.
    """

    name: str
    path: Path
    consumer: str
    scheme: str
    bytes: int
    parameters: int | None
    not_run: str | None = None
    version: str | None = None
    loss_nats: float | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    tokens: int | None = None
    sources: dict[str, float] = field(default_factory=dict)
    mean_kl: float | None = None
    max_kl: float | None = None
    top1_agreement: float | None = None
    positions: int | None = None
    generation: tuple[Generated, ...] = ()
    samples: tuple[str, ...] = ()
    scoring_tokens_per_second: float | None = None
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None

    @property
    def bits_per_weight(self) -> float | None:
        """Bits on disk per parameter."""
        return 8 * self.bytes / self.parameters if self.parameters else None

    @property
    def label(self) -> str:
        """Name and consumer."""
        return f"{self.name} ({self.consumer})"

    def generated(self, batch: int) -> Generated | None:
        """Generation at a batch size."""
        return next((each for each in self.generation if each.batch == batch), None)


def as_json(rows: Sequence[Row]) -> str:
    """The rows as a JSON list; a figure that is not finite is null."""
    listed = [_finite({**asdict(row), "path": str(row.path), "bits_per_weight": row.bits_per_weight}) for row in rows]
    return json.dumps(listed, indent=1, allow_nan=False)


def row_of(found: dict[str, Any]) -> Row:
    """A row from its JSON object."""
    known = {each.name for each in fields(Row)}
    given = {key: value for key, value in found.items() if key in known}
    generation = tuple(Generated(**each) for each in given["generation"])
    return Row(**{**given, "path": Path(given["path"]), "generation": generation, "samples": tuple(given["samples"])})


def as_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV with a line of headings; figures that were not measured are empty cells."""
    sources = sorted({name for row in rows for name in row.sources})
    batches = sorted({each.batch for row in rows for each in row.generation})
    heads = [*HEADINGS, *(f"loss_nats:{name}" for name in sources)]
    heads += [f"{what}:batch{batch}" for batch in batches for what in ("generated_tokens_per_second", "peak_bytes")]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(heads)
    for row in rows:
        cells = [row.name if head == "model" else getattr(row, head) for head in HEADINGS]
        cells += [row.sources.get(name) for name in sources]
        for batch in batches:
            made = row.generated(batch)
            cells += [made.tokens_per_second, made.peak_bytes] if made else [None, None]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return out.getvalue()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
