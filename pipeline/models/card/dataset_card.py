"""README.md of a tokens directory, as the Hugging Face Hub shows a dataset: front matter, sizes, sources. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from foundation.directory import Manifest
from pipeline.models.card.facts import CardFacts, Gaps
from pipeline.models.card.front_matter import as_text, of_dataset
from pipeline.models.card.lineage import corpus_of, tokenizer_of
from pipeline.models.card.steps_text import SHORT, processing_sentence, source_table

_READ = """## How to read it

FOLDER is where this file lies. The token files are Megatron-LM's: `.bin` has ids back to back, `.idx` where documents
begin; `tokenizer/` is a Hugging Face folder. A config of `headrace train` names the folder as `data.sources[].path`.

```python
import numpy as np
from transformers import AutoTokenizer

ids = np.memmap("FOLDER/{shard}", dtype="{dtype}")
print(AutoTokenizer.from_pretrained("FOLDER/tokenizer").decode(ids[:64]))
```
"""
_LARGEST_UINT16 = 65_500
"""Vocabularies below this size are stored as uint16, others as int32, as Megatron-LM does."""


def dataset_card(manifest: Manifest, facts: CardFacts, gaps: Gaps) -> str:
    """Makes the card as Markdown.

    Args:
        manifest: manifest of the tokens directory.
        facts: facts that a person has stated.
        gaps: collector of missing facts.
    """
    train = corpus_of(manifest)
    documents = sum(split["documents"] for split in manifest.details["splits"].values())
    about = of_dataset(facts, gaps, documents=documents, known_languages=train["languages"], sources=train["sources"])
    return "\n".join([as_text(about), *_body(manifest, facts)]).rstrip() + "\n"


def title_of(manifest: Manifest, facts: CardFacts) -> str:
    """Returns the name of the dataset that a person has stated, or else its kind and size."""
    tokens = sum(split["tokens"] for split in manifest.details["splits"].values())
    return facts.name or f"Text corpus, {tokens:,} tokens"


def summary_of(manifest: Manifest, facts: CardFacts) -> str:
    """Describes the dataset in a paragraph."""
    tokenizer = tokenizer_of(manifest)
    made = f"{tokenizer['kind']} tokenizer with {tokenizer['vocab_size']:,} ids" if tokenizer else "a tokenizer"
    text = f"Token files of text for language models, made with Headrace's data prep: {made}."
    return f"{facts.description}\n\n{text}" if facts.description else text


def _body(manifest: Manifest, facts: CardFacts) -> Iterator[str]:
    yield f"# {title_of(manifest, facts)}\n"
    yield f"{summary_of(manifest, facts)} Fingerprint `{manifest.fingerprint[:SHORT]}`.\n"
    if facts.license is None:
        yield "Its license is not recorded here: state it before you publish it.\n"
    yield "## Splits and sources\n"
    for name in manifest.details["splits"]:
        split = corpus_of(manifest, split=name)
        yield f"### {name}: {split['documents']:,} documents, {split['tokens']:,} tokens\n"
        yield from source_table(split["sources"])
    yield "## Processing\n"
    yield f"{processing_sentence(corpus_of(manifest))}\n"
    yield from _dropped(manifest)
    yield from _how_to_read(manifest)
    yield "`manifest.json` has the SHA-256 checksum of every file and the resolved config.\n"


def _dropped(manifest: Manifest) -> Iterator[str]:
    counts = {f"dropped: {k}": v for k, v in (manifest.details.get("dropped") or {}).items()}
    counts |= {f"skipped: {k}": v for k, v in (manifest.details.get("skipped") or {}).items()}
    if counts:
        yield "| documents left out | |\n|---|---:|"
        yield from (f"| {reason} | {number:,} |" for reason, number in counts.items())
        yield ""


def _how_to_read(manifest: Manifest) -> Iterator[str]:
    shard = next((name for name in sorted(manifest.files, reverse=True) if name.endswith(".bin")), None)
    if shard is not None:
        small = tokenizer_of(manifest).get("vocab_size", 0) < _LARGEST_UINT16
        yield _READ.replace("{shard}", shard).replace("{dtype}", "uint16" if small else "int32")
