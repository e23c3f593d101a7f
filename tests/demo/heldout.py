"""The documents that the demo held out when its figures were first written down, and what a model makes of them.

    python -m tests.demo.heldout out/demo/compressed/original --sequence-length 128

The demo's text is what is installed, so its own held-out split differs between installations; `heldout.jsonl.zst` does
not. Bits per byte on it compare demos of any tokenizer, version and machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
import zstandard
from transformers import AutoTokenizer

from data_prep.formats.tokenfile import TokenFileWriter, dtype_for, shard_name, shard_prefix
from data_prep.tokenizer.fingerprint import tokenizer_fingerprint
from foundation.directory import commit, staging_path
from pipeline.data.dataset import TokenDataset
from pipeline.evaluation.heldout.heldout_loss import HeldOut, evaluate
from pipeline.models.folder.loading import load_model, pick_device

FILE = Path(__file__).with_name("heldout.jsonl.zst")


def documents() -> list[dict[str, str]]:
    """The source and the text of each, those of a source together."""
    data = zstandard.ZstdDecompressor().decompress(FILE.read_bytes())
    return [json.loads(line) for line in data.decode().splitlines()]


def tokens_of(model: Path, final: Path) -> Path:
    """Writes them as a tokens directory, by the model's tokenizer: a shard per source, as data prep does."""
    tokenizer, staging = AutoTokenizer.from_pretrained(model), staging_path(final)
    (staging / "heldout").mkdir(parents=True)
    dtype, shards = dtype_for(len(tokenizer)), []
    for i, (source, group) in enumerate(groupby(documents(), key=lambda document: document["source"])):
        texts = [document["text"] for document in group]
        with TokenFileWriter(shard_prefix(staging, "heldout", i), dtype=dtype) as writer:
            ids = [[*tokenizer(text, split_special_tokens=True)["input_ids"], tokenizer.eos_token_id] for text in texts]
            for document in ids:
                writer.append(np.asarray(document, dtype=dtype))
        size = {"tokens": sum(map(len, ids)), "bytes": sum(len(text.encode()) for text in texts)}
        shards.append({"name": shard_name(i), "source": source, "documents": len(texts), **size})
    totals = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
    tokenizer.save_pretrained(staging / "tokenizer")
    fingerprint = tokenizer_fingerprint(staging / "tokenizer")
    about = {"fingerprint": fingerprint, "vocab_size": len(tokenizer), "eos_id": tokenizer.eos_token_id}
    details = {"tokenizer": about, "splits": {"heldout": {**totals, "shards": shards}}}
    commit(staging, final, kind="tokens", config={}, details=details)
    return final


def score(model: Path, *, sequence_length: int) -> HeldOut:
    """Loss and bits per byte of a model folder on all of these documents."""
    with tempfile.TemporaryDirectory() as work:
        tokens = tokens_of(model, Path(work) / "tokens")
        dataset = TokenDataset.open(tokens, split="heldout", sequence_length=sequence_length)
        device = pick_device()
        return evaluate(load_model(model, device=device), dataset, batch_size=16, device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--sequence-length", type=int, required=True, metavar="T")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for model in args.models:
        found = score(model, sequence_length=args.sequence_length)
        numbers = f"loss {found.loss_nats:.4f}  perplexity {found.perplexity:.2f}"
        print(f"{model}: {found.bits_per_byte:.4f} bits per byte  {numbers}  {found.tokens:,} tokens")


if __name__ == "__main__":
    main()
