"""Tokens directories of any size whose files take no room on disk: holes, but for what opening looks at."""

from __future__ import annotations

import struct
from pathlib import Path

from foundation.directory import write_manifest

TOKENIZER = {"fingerprint": "none", "vocab_size": 50_000, "eos_id": 0, "bos_id": None, "pad_id": None}


def write_sparse(directory: Path, *, shards: int, tokens: int, documents: int) -> Path:
    """Writes a training split of so many shards, each of so many tokens and documents; all ids are 0."""
    (directory / "train").mkdir(parents=True)
    entries, files = [], {}
    for number in range(shards):
        name = f"shard-{number:05d}"
        sizes = write_pair(directory / "train" / name, tokens=tokens, documents=documents)
        files |= {f"train/{name}{suffix}": {"bytes": size, "sha256": "0" * 64} for suffix, size in sizes.items()}
        entries.append({"name": name, "source": "web", "documents": documents, "tokens": tokens, "bytes": 4 * tokens})
    sums = {key: shards * value for key, value in (("documents", documents), ("tokens", tokens), ("bytes", 4 * tokens))}
    splits = {"train": {**sums, "shards": entries, "sources": {"web": sums}}}
    write_manifest(directory, kind="tokens", config={}, details={"tokenizer": TOKENIZER, "splits": splits}, files=files)
    return directory


def write_pair(prefix: Path, *, tokens: int, documents: int) -> dict[str, int]:
    """One token file, uint16, as holes with a header and the last entries of its index; returns sizes by suffix."""
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, documents, documents + 1)
    sizes = {".bin": 2 * tokens, ".idx": len(header) + 12 * documents + 8 * (documents + 1)}
    last = tokens // documents
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(header)
        for at, value in (
            (len(header) + 4 * (documents - 1), struct.pack("<i", last)),
            (len(header) + 4 * documents + 8 * (documents - 1), struct.pack("<q", 2 * (tokens - last))),
            (sizes[".idx"] - 8, struct.pack("<q", documents)),
        ):
            file.seek(at)
            file.write(value)
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(sizes[".bin"])
    return sizes
