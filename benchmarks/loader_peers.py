"""Benchmark of Megatron's GPTDataset over one shard, for comparison in `loader.py`; runs in its own Python.

    PYTHON benchmarks/loader_peers.py PREFIX LENGTH BATCH

Prints JSON: for each round, samples per second of CPU time from PREFIX. Imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # type: ignore[import-not-found]
from megatron.core.datasets.indexed_dataset import IndexedDataset  # type: ignore[import-not-found]
from megatron.core.datasets.utils import Split  # type: ignore[import-not-found]

ROUNDS, BATCHES = 5, 100


class Tokenizer:
    """The attributes of a tokenizer that the dataset needs."""

    eod = pad = 0
    vocab_size = 50_000
    unique_identifiers = {"class": "Tokenizer"}  # noqa: RUF012  the interface wants this attribute


def main() -> None:
    """Measures and prints."""
    prefix, length, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    random, rates = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as cache:
        dataset = build(prefix, length=length, cache=cache)
        for _ in range(ROUNDS):
            wanted = [random.integers(0, len(dataset), batch).tolist() for _ in range(BATCHES)]
            cpu = time.process_time()
            for numbers in wanted:
                samples = [dataset[number] for number in numbers]
                for key in ("tokens", "labels"):
                    torch.stack([sample[key] for sample in samples])
            rates.append(BATCHES * batch / (time.process_time() - cpu))
    print(json.dumps(rates))


def build(prefix: str, *, length: int, cache: str) -> Any:
    """Builds one epoch of all documents, as Megatron's training does, without optional masks and positions."""
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=length,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = IndexedDataset(prefix, mmap=True)
    documents = np.arange(len(indexed.document_indices) - 1, dtype=np.int32)
    return GPTDataset(indexed, prefix, documents, None, Split.train, config)


if __name__ == "__main__":
    main()
