"""Reads tokens of other tools in place: a run needs only a memory map and an index of documents.

- Megatron-LM: PREFIX.bin and PREFIX.idx, one shard.
- datatrove and nanotron: one NAME.ds with NAME.ds.index (a shard), or a folder of them.

A manifest is derived from the indexes and from the tokenizer's folder, which the config has to name. `headrace import`
converts formats without an index of documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_prep.formats.dsfile import DS, INDEX, LOSS, tokenizer_name
from data_prep.formats.indexed import IndexedTokens, open_indexed
from data_prep.formats.maskfile import mask_path, open_mask
from data_prep.formats.tokenfile import with_suffix
from data_prep.tokenizer.fingerprint import TOKENIZER_JSON, tokenizer_fingerprint
from data_prep.tokenizer.load import describe
from data_prep.tokenizer.text_bytes import text_bytes
from foundation.directory import MANIFEST, Manifest, fingerprint_of
from foundation.errors import ConfigError, DataError

_PIECE_BYTES, _PIECES = 1 << 16, 256
_CHECKED_TOKENS = 1 << 16
_CHECKED_SHARDS = 16


@dataclass(frozen=True)
class InPlace:
    """A dataset of another tool.

    Attributes:
        path: path in the config.
        kind: tool that wrote the dataset, for messages.
        folder: folder of the files.
        names: names of the shards, in order.
    """

    path: Path
    kind: str
    folder: Path
    names: tuple[str, ...]

    @property
    def index(self) -> str:
        """Path of the first shard's index, which does not name the tokenizer."""
        return f"{self.folder / self.names[0]}{INDEX if self.kind == 'datatrove' else '.idx'}"

    @property
    def tokenizer_name(self) -> str | None:
        """Tokenizer name in the dataset's metadata; None if there is none."""
        return tokenizer_name(self.folder / self.names[0]) if self.kind == "datatrove" else None


def find(path: str | Path) -> InPlace | None:
    """Finds a dataset of another tool that can be read in place at a path; None if there is none."""
    path = Path(path)
    if path.is_dir():
        names = () if (path / MANIFEST).exists() else tuple(sorted(each.name for each in path.glob(f"*{DS}")))
        return InPlace(path, "datatrove", path, names) if names else None
    if path.name.endswith(DS) and path.is_file():
        return InPlace(path, "datatrove", path.parent, (path.name,))
    if with_suffix(path, ".idx").is_file():
        return InPlace(path, "Megatron-LM", path.parent, (path.name,))
    return None


def manifest_of(dataset: InPlace, *, tokenizer: str, field: str, split: str = "train") -> Manifest:
    """Makes the manifest of another tool's dataset, with all of its shards in one split.

    The fingerprint covers the sizes of all files, but at most 16 MiB of the indexes, since every rank computes it.

    Args:
        dataset: a dataset that `find` has found.
        tokenizer: Hugging Face folder of its tokenizer.
        field: the config field that names the tokenizer.
        split: name of the split. A held-out split is read once, to count its text bytes.

    Raises:
        DataError: the dataset is damaged, there is no tokenizer, or bytes cannot be counted (see `text_bytes`).
        ConfigError: a shard begins or ends with ids that the tokenizer lacks, or the metadata names another tokenizer.
    """
    details = describe(Path(tokenizer), kind="given")
    _check_name(dataset, details["fingerprint"], field=field, tokenizer=tokenizer)
    shards: list[dict[str, Any]] = []
    dtypes: dict[np.dtype[Any], str] = {}
    looked_at = set(np.linspace(0, len(dataset.names) - 1, _CHECKED_SHARDS).astype(int).tolist())
    for number, name in enumerate(dataset.names):
        file = open_indexed(dataset.folder / name)
        if number in looked_at:
            _check_ids(file, details["vocab_size"], field=field, tokenizer=tokenizer)
        counts = {"documents": file.documents, "tokens": int(file.tokens.size), "bytes": 0}
        if split == "heldout" and file.tokens.size:
            counts["bytes"] = text_bytes(file, Path(tokenizer))
        if file.tokens.size:
            dtypes[file.tokens.dtype] = name
        shards.append({"name": name, **counts})
    if len(dtypes) > 1:
        found = " and ".join(f"{8 * dtype.itemsize} bits in {name}" for dtype, name in dtypes.items())
        raise DataError(
            f"{dataset.path} has ids of {found}: files of two tokenizers\n  try: a folder for each, as two sources"
        )
    sums = {key: sum(int(shard[key]) for shard in shards) for key in ("documents", "tokens", "bytes")}
    found_split = {**sums, "shards": shards, "masked": _masked(dataset, shards)}
    named = {"made_with": dataset.tokenizer_name} if dataset.tokenizer_name else {}
    return Manifest(
        kind="tokens",
        config={},
        parents={},
        details={"tokenizer": details, "splits": {split: found_split}, **named},
        files={},
        fingerprint=_fingerprint(dataset),
        code={},
    )


def _check_name(dataset: InPlace, fingerprint: str, *, field: str, tokenizer: str) -> None:
    """Compares the tokenizer with the tokenizer folder that the metadata names, if that folder still exists."""
    named = dataset.tokenizer_name
    if named is None:
        return
    folder = Path(named).parent if named.endswith(".json") else Path(named)
    if (folder / TOKENIZER_JSON).is_file() and tokenizer_fingerprint(folder) != fingerprint:
        why = f"the metadata of {dataset.path} says that it was made with {named}, which is another tokenizer"
        raise ConfigError(field, tokenizer, why=why, remedy=f'"{folder}"')


def _check_ids(file: IndexedTokens, vocab_size: int, *, field: str, tokenizer: str) -> None:
    """Checks the ids at both ends of a shard, to detect a vocabulary that is too small before a GPU assertion does."""
    ends = np.concatenate([file.tokens[:_CHECKED_TOKENS], file.tokens[-_CHECKED_TOKENS:]])
    low, high = int(ends.min(initial=0)), int(ends.max(initial=0))
    if low < 0 or high >= vocab_size:
        why = f"{file.path} holds the id {low if low < 0 else high}, and the tokenizer has {vocab_size} ids"
        raise ConfigError(field, tokenizer, why=why, remedy="name the tokenizer that made it")


def _masked(dataset: InPlace, shards: list[dict[str, Any]]) -> bool:
    """Whether the shards have loss masks; either all or none must have one."""
    paths = {name: mask_path(dataset.folder / name) for name in dataset.names}
    if dataset.kind != "datatrove" or not any(path.is_file() for path in paths.values()):
        return False
    for shard in shards:
        if open_mask(dataset.folder / shard["name"], tokens=shard["tokens"]) is None:
            raise DataError(
                f"{paths[shard['name']]} is missing, and other files have one: a loss mask for all or for none"
                "\n  try: write the folder again, or a folder for each"
            )
    return True


def _fingerprint(dataset: InPlace) -> str:
    if dataset.kind == "Megatron-LM":
        sizes = {suffix: with_suffix(dataset.path, suffix).stat().st_size for suffix in (".bin", ".idx")}
        return fingerprint_of({"kind": "megatron", "sizes": sizes, "index": _hash(with_suffix(dataset.path, ".idx"))})
    pieces = max(1, _PIECES // len(dataset.names))
    files: list[list[Any]] = []
    for name in dataset.names:
        paths = [Path(f"{dataset.folder / name}{suffix}") for suffix in ("", INDEX, LOSS)]
        files.append([name, [path.stat().st_size for path in paths if path.exists()], _hash(paths[1], pieces=pieces)])
    return fingerprint_of({"kind": "datatrove", "files": files})


def _hash(path: Path, *, pieces: int = _PIECES) -> str:
    """Computes the checksum of a file; for a large file, of `pieces` evenly spaced pieces of 64 KiB."""
    digest, last = xxhash.xxh3_128(), max(0, path.stat().st_size - _PIECE_BYTES)
    pieces = min(pieces, 1 + -(-last // _PIECE_BYTES))
    with path.open("rb") as file:
        for i in range(pieces):
            file.seek(last * i // max(1, pieces - 1))
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
