"""Megatron-LM datasets: PREFIX.bin and PREFIX.idx without a manifest, read in place as one shard.

A manifest is derived from the index and from the tokenizer's folder, which the config has to name.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from data_prep.formats.tokenfile import TokenFile, with_suffix
from data_prep.tokenizer.load import describe
from headrace.base.directory import Manifest, fingerprint_of
from headrace.base.errors import ConfigError
from pipeline.data.text_bytes import text_bytes

_PIECE_BYTES, _PIECES = 1 << 16, 256
_CHECKED_TOKENS = 1 << 16


def is_prefix(path: str | Path) -> bool:
    """Whether a path is the prefix of a Megatron-LM dataset, and not a directory."""
    return not Path(path).is_dir() and with_suffix(Path(path), ".idx").is_file()


def manifest_of(prefix: Path, *, tokenizer: str, field: str, split: str = "train") -> Manifest:
    """The manifest of a Megatron-LM dataset: one shard, which is one split.

    The fingerprint covers the sizes of both files and up to 16 MiB of the index, since every rank computes it.

    Args:
        prefix: the dataset.
        tokenizer: Hugging Face folder of its tokenizer.
        field: the config field that names the tokenizer.
        split: name of the split. The text bytes of a held-out split are counted, which reads it once.

    Raises:
        DataError: it is damaged, there is no tokenizer, or its bytes cannot be counted (see `text_bytes`).
        ConfigError: it begins or ends with ids that the tokenizer does not have.
    """
    file = TokenFile.open(prefix)
    details = describe(Path(tokenizer), kind="given")
    _check_ids(file, details["vocab_size"], field=field, tokenizer=tokenizer)
    counts = {"documents": file.documents, "tokens": int(file.tokens.size), "bytes": 0}
    if split == "heldout":
        counts["bytes"] = text_bytes(file, Path(tokenizer))
    sizes = {suffix: with_suffix(prefix, suffix).stat().st_size for suffix in (".bin", ".idx")}
    return Manifest(
        kind="tokens",
        config={},
        parents={},
        details={"tokenizer": details, "splits": {split: {**counts, "shards": [{"name": prefix.name, **counts}]}}},
        files={},
        fingerprint=fingerprint_of({"kind": "megatron", "sizes": sizes, "index": _hash(with_suffix(prefix, ".idx"))}),
        code={},
    )


def _check_ids(file: TokenFile, vocab_size: int, *, field: str, tokenizer: str) -> None:
    """Checks the ids at both ends: a vocabulary that is too small is found here, not by an assertion on a GPU."""
    ends = np.concatenate([file.tokens[:_CHECKED_TOKENS], file.tokens[-_CHECKED_TOKENS:]])
    low, high = int(ends.min(initial=0)), int(ends.max(initial=0))
    if low < 0 or high >= vocab_size:
        why = f"{file.prefix} holds the id {low if low < 0 else high}, and the tokenizer has {vocab_size} ids"
        raise ConfigError(field, tokenizer, why=why, remedy="name the tokenizer that made it")


def _hash(path: Path) -> str:
    """Checksum of a file; of one larger than `_PIECES` pieces, of so many evenly spaced pieces."""
    digest, last = xxhash.xxh3_128(), max(0, path.stat().st_size - _PIECE_BYTES)
    pieces = min(_PIECES, 1 + -(-last // _PIECE_BYTES))
    with path.open("rb") as file:
        for i in range(pieces):
            file.seek(last * i // max(1, pieces - 1))
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
