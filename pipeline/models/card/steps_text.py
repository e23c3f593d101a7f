"""The lineage of a model as Markdown. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SHORT = 12
"""Number of characters of a fingerprint to show."""

_TITLES = {
    "training": "Training",
    "distillation": "Training by distillation",
    "quantization": "Quantization",
    "pruning": "Pruning",
    "merge": "Merge of checkpoints",
    "given": "A model from elsewhere",
}
_LABELS = {
    "tokens": "tokens seen",
    "optimizer_steps": "optimizer steps",
    "global_batch": "global batch, samples",
    "sequence_length": "sequence length, tokens",
    "group_size": "group size, weights",
    "layers": "matrices quantized",
    "parameters": "parameters quantized",
    "bits_per_quantized_weight": "bits per quantized weight",
    "weight_bytes_before": "weights before, bytes",
    "weight_bytes_after": "weights after, bytes",
    "teacher_fingerprint": "teacher's fingerprint",
}
_DISTILLATION = "distillation"


def corpus_lines(corpora: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the corpora as tables: sources with documents, bytes and tokens."""
    if not corpora:
        yield "The corpus is not recorded: the model was given, or made by a version that did not record it.\n"
        return
    yield "### Corpus\n"
    for corpus in corpora:
        yield f"{_corpus_sentence(corpus)}\n"
        yield from source_table(corpus.get("sources") or [])
        if "cleaning" in corpus:
            yield f"{processing_sentence(corpus)}\n"


def source_table(sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a table of sources with documents, bytes, tokens and shares; nothing if there are no sources."""
    if not sources:
        return
    yield "| source | documents | bytes | tokens | share of tokens |\n|---|---:|---:|---:|---:|"
    total = sum(source["tokens"] for source in sources) or 1
    for each in sources:
        counts = " | ".join(f"{each[key]:,}" for key in ("documents", "bytes", "tokens"))
        yield f"| {each['name']} | {counts} | {each['tokens'] / total:.1%} |"
    yield ""


def processing_sentence(corpus: Mapping[str, Any]) -> str:
    """Names cleaning and deduplication of a corpus as in its config."""
    steps, kinds = corpus.get("cleaning") or [], corpus.get("deduplication") or []
    return f"Cleaning: {', '.join(steps) or 'none'}. Deduplication: {', '.join(kinds) or 'none'}."


def step_lines(number: int, step: Mapping[str, Any]) -> Iterator[str]:
    """Yields one step: its name, and its numbers as a table."""
    kind = str(step["step"])
    yield f"### {number}. {_TITLES.get(kind, kind.capitalize())}\n"
    rows = list(_rows({key: value for key, value in step.items() if key != "step"}))
    if rows:
        yield "| | |\n|---|---|"
        yield from (f"| {name} | {value} |" for name, value in rows)
        yield ""


def _corpus_sentence(corpus: Mapping[str, Any]) -> str:
    name = f"**{corpus['name']}**, " if corpus.get("name") else ""
    weight = corpus.get("weight")
    share = "" if weight is None else f", mixing weight {weight:.4g}"
    tokens = "" if corpus.get("tokens") is None else f", {corpus['tokens']:,} training tokens"
    tokenizer = corpus.get("tokenizer") or {}
    size = tokenizer.get("vocab_size")
    made = "" if size is None else f", {tokenizer.get('kind', '')} tokenizer with {size:,} ids".replace("  ", " ")
    gone = "" if corpus.get("sources") else "; its sources are not recorded: its directory was gone, or had changed"
    return f"{name}fingerprint `{corpus['fingerprint'][:SHORT]}`{share}{tokens}{made}{gone}."


def _rows(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, Mapping):
            text = ", ".join(f"{name} {_shown(name, each)}" for name, each in value.items())
        else:
            text = _shown(key, value)
        if text:
            yield _LABELS.get(key, key.replace("_", " ")), text


def _shown(key: str, value: Any) -> str:
    if key.endswith("fingerprint"):
        return f"`{str(value)[:SHORT]}`"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key != "seed":
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(_shown("", each) for each in value)
    return str(value).replace("|", "\\|").replace("\n", " ")
