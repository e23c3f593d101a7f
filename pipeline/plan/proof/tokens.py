"""Writes a small synthetic tokens directory for proofs, so that the user's own data is not needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.formats.tokenfile import SPLITS, TokenFileWriter, dtype_for, shard_name, shard_prefix
from foundation.directory import commit, fresh_staging

EOS = 0
"""The id that ends every document."""


def write_tokens(directory: Path, *, vocab_size: int, tokens: int, longest: int) -> Path:
    """Writes documents with a structure to learn: every id is followed by one of three ids.

    Args:
        directory: directory to create.
        vocab_size: number of ids.
        tokens: approximate number of tokens in each split.
        longest: maximum document length in tokens; lengths are uniform from 2, so boundaries fall at any position.
    """
    staging = fresh_staging(directory)
    splits = {}
    for number, split in enumerate(SPLITS):
        (staging / split).mkdir()
        random = np.random.default_rng(number)
        documents = 0
        with TokenFileWriter(shard_prefix(staging, split, 0), dtype=dtype_for(vocab_size)) as writer:
            while writer.tokens < tokens:
                writer.append(_document(random, int(random.integers(2, longest + 1)), vocab_size))
                documents += 1
        counts = {"documents": documents, "tokens": writer.tokens, "bytes": writer.tokens}
        splits[split] = {**counts, "shards": [{"name": shard_name(0), **counts}]}
    tokenizer = {"fingerprint": "proof", "vocab_size": vocab_size, "bos_id": None, "eos_id": EOS, "pad_id": None}
    details = {"tokenizer": tokenizer, "splits": splits, "skipped": {}}
    commit(staging, directory, kind="tokens", config={}, parents={}, details=details)
    return directory


def _document(random: np.random.Generator, length: int, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    ids = np.empty(length, dtype=np.int64)
    ids[0] = random.integers(1, vocab_size)
    for i in range(1, length - 1):
        ids[i] = 1 + (3 * ids[i - 1] + random.integers(3)) % (vocab_size - 1)
    ids[-1] = EOS
    return ids
