"""`python -m data_prep pack DIR --length T`: packs whole documents into training samples with little padding.

In each shard, blocks of `look_ahead` consecutive documents are packed independently, long ones by the rules of
`long_documents.py`: all documents of a sample come from one block, and memory is bounded. The result is a subdirectory
of the tokens directory. The rest of that directory is unchanged: tokens keep their fingerprint, and may be packed for
several lengths.
"""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from data_prep.executors.base import default_workers
from data_prep.executors.local import LocalExecutor
from data_prep.formats.maskfile import MASK, open_mask
from data_prep.formats.packfile import I64, PACK_SUFFIX, PACKING_KIND, cut_documents, packing_name, write_pack
from data_prep.formats.tokenfile import TokenFile
from data_prep.packing.best_fit import best_fit
from data_prep.packing.long_documents import Long, count_targets, describe, shorten
from data_prep.task import Counts, Marker, Report
from foundation.directory import Manifest, commit, fresh_staging, read_manifest
from foundation.errors import ConfigError, DataError
from foundation.lock import lock_file
from foundation.paths import LOCAL

LOOK_AHEAD = 1 << 16
"""Documents per block. With web-like lengths, padding is 0.01 % at T = 2048 and 8192; a block takes a dozen MB."""
PACKED = "train"
"""Split to pack. Held-out text is always evaluated in contiguous windows that cover every token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `python -m data_prep pack`."""
    parser.add_argument("directory", metavar="DIR", type=LOCAL.as_path(), help="a tokens directory")
    parser.add_argument("--length", type=int, required=True, metavar="T", help="tokens per sample, as in training")
    text = f"documents that are packed together (default: {LOOK_AHEAD:,})"
    parser.add_argument("--look-ahead", type=int, default=LOOK_AHEAD, metavar="N", help=text)
    text = "documents of more than T + 1 tokens (default, auto: cut texts, truncate conversations to whole answers)"
    parser.add_argument("--long", choices=get_args(Long), default="auto", help=text)
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (default: number of CPU cores)")


def run(arguments: argparse.Namespace) -> None:
    """Packs, and prints the shares of trained tokens and of padding."""
    for name in ("length", "look_ahead", "workers"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(flag, getattr(arguments, name), why="must be positive", remedy="1 or more")
    directory, length = arguments.directory, arguments.length
    workers = arguments.workers or default_workers()
    how = {"look_ahead": arguments.look_ahead, "long": arguments.long}
    manifest = pack(directory, length=length, workers=workers, **how)
    entry = manifest.details["splits"][PACKED]
    positions = entry["bins"] * length
    trained, padding = (100 * entry[key] / positions for key in ("targets", "padding"))
    print(f"{directory / packing_name(length)}: {entry['bins']:,} samples of {length:,} tokens", end="; ")
    print(f"{trained:.2f} % of them are training targets, {padding:.2f} % are padding")
    if line := describe(entry, length=length):
        print(line)


def pack(
    directory: Path, *, length: int, look_ahead: int = LOOK_AHEAD, long: Long = "auto", workers: int = 1
) -> Manifest:
    """Packs the training split of a tokens directory for samples of `length` tokens; `long` as in `shorten`.

    Returns:
        The manifest of the new directory, or the existing one if it was already packed in the same way.

    Raises:
        DataError: the path is not a tokens directory; a packing exists that was made differently; no document is left;
            or another process is packing.
    """
    tokens = read_manifest(directory, kind="tokens")
    final, config = directory / packing_name(length), dict[str, Any](length=length, look_ahead=look_ahead)
    if long == "auto" and not any(name.endswith(MASK) for name in tokens.files):
        long = "cut"
    config |= {} if long == "cut" else {"long": long}
    parents = {"tokens": {"path": "..", "fingerprint": tokens.fingerprint}}
    if final.exists():
        return _existing(final, config, parents)
    with _exclusive(final):
        if final.exists():  # the process that held the lock before made it
            return _existing(final, config, parents)
        staging = fresh_staging(final)
        (staging / PACKED).mkdir()
        names = [shard["name"] for shard in tokens.details["splits"][PACKED]["shards"]]
        how: dict[str, Any] = {"length": length, "look_ahead": look_ahead, "long": long}
        tasks = [PackTask(directory / PACKED / name, staging / PACKED / name, **how) for name in names]
        done = _run(tasks, workers=workers)
        sha256 = {f"{PACKED}/{task.target.name}{PACK_SUFFIX}": done[task].pop("sha256") for task in tasks}
        entries = [{"name": name} | done[task] for name, task in zip(names, tasks, strict=True)]
        sums = {key: sum(entry[key] for entry in entries) for key in entries[0] if key != "name"}
        if not sums["bins"]:
            shutil.rmtree(staging)
            why = f"no document of {directory} is left: all {sums['long']:,} with two tokens or more are too long"
            raise DataError(f'{why}\n  try: a larger --length, or "--long cut"')
        details = {**config, "splits": {PACKED: {**sums, "shards": entries}}}
        described: dict[str, Any] = {"config": config, "parents": parents, "details": details}
        return commit(staging, final, kind=PACKING_KIND, **described, known_sha256=sha256)


@dataclass(frozen=True)
class PackTask:
    """Packs one shard.

    Attributes:
        source: path prefix of the shard.
        target: path prefix of the pack file.
        length: T, tokens per sample.
        look_ahead: number of documents that are packed together.
        long: treatment of documents longer than a sample (`shorten`).
    """

    source: Path
    target: Path
    length: int
    look_ahead: int
    long: Long

    @property
    def name(self) -> str:
        """Implements `Task.name`."""
        return f"pack of {self.source.name}"

    @property
    def finished(self) -> bool:
        """Implements `Task.finished`: an interrupted packing does not resume, it starts over."""
        return False

    def run(self, report: Report) -> Marker:
        """Implements `Task.run`; returns counts and the SHA-256 of the file.

        It counts bins, pieces, training targets, padding positions, long documents and the targets lost with them.
        """
        file, counts = TokenFile.open(self.source), Counter(dict.fromkeys(_COUNTS, 0))
        blocks = list(self._blocks(file, open_mask(self.source, tokens=file.tokens.size), counts, report))
        bins, pieces = sum(sizes.size for sizes, _, _ in blocks), sum(starts.size for _, starts, _ in blocks)
        first_piece = np.zeros(bins + 1, dtype=np.int64)
        np.cumsum(_concatenate([sizes for sizes, _, _ in blocks]), out=first_piece[1:])
        starts, lengths = _concatenate([b[1] for b in blocks]), _concatenate([b[2] for b in blocks])
        path = Path(f"{self.target}{PACK_SUFFIX}")
        sha256 = write_pack(path, length=self.length, first_piece=first_piece, starts=starts, lengths=lengths)
        padding = bins * (self.length + 1) - int(lengths.sum())
        return {"bins": bins, "pieces": pieces, "padding": padding, **counts, "sha256": sha256}

    def _blocks(
        self, file: TokenFile, mask: Any, counts: Counter[str], report: Report
    ) -> Iterator[tuple[I64, I64, I64]]:
        """Yields, for each block, the number of pieces in each bin, and the starts and lengths of all pieces by bin."""
        for first in range(0, file.documents, self.look_ahead):
            end = min(first + self.look_ahead, file.documents)
            bounds = file.document_starts(np.arange(first, end + 1))
            tokens, kept = np.diff(bounds), shorten(bounds, mask, length=self.length, long=self.long)
            starts, lengths = cut_documents(bounds, tokens=kept, length=self.length)
            targets, long = count_targets(mask, starts, lengths), tokens > self.length + 1
            counts["targets"] += targets
            counts["lost"] += count_targets(mask, bounds[:-1], tokens) - targets
            counts["long"] += int(long.sum())
            counts["cut"] += int((kept > self.length + 1).sum())
            counts["truncated"] += int((long & (kept > 1) & (kept <= self.length + 1)).sum())
            counts["dropped"] += int((long & (kept <= 1)).sum())
            number = best_fit(lengths, size=self.length + 1)
            order = np.argsort(number, kind="stable")
            yield np.bincount(number), starts[order], lengths[order]
            report(Counts(tokens=int(bounds[-1] - bounds[0]), documents=end - first))


_COUNTS = ("targets", "lost", "long", "cut", "truncated", "dropped")


@contextmanager
def _exclusive(final: Path) -> Iterator[None]:
    """Holds the lock of a packing.

    The lock file is removed only when the packing exists: until then, a process that has opened it still excludes
    others.

    Raises:
        DataError: another process holds the lock.
    """
    path = final.parent / f".{final.name}.lock"
    with lock_file(path, doing=f"packing {final.parent} into {final.name}"):
        yield
        path.unlink(missing_ok=True)


def _run(tasks: list[PackTask], *, workers: int) -> dict[Any, Marker]:
    if workers == 1:  # a small dataset is packed before a worker process could start
        return {task: task.run(_ignore_progress) for task in tasks}
    with LocalExecutor(workers) as executor:
        return dict(executor.run(tasks, report=_ignore_progress))


def _ignore_progress(_counts: Counts) -> None:
    """Ignores progress: packing takes seconds where data prep takes hours."""


def _existing(final: Path, config: dict[str, Any], parents: dict[str, Any]) -> Manifest:
    manifest = read_manifest(final, kind=PACKING_KIND)
    if (manifest.config, manifest.parents) != (config, parents):
        why = f"{final} exists, and was made from other tokens or with another config"
        raise DataError(f"{why}\n  try: remove it, and pack again")
    return manifest


def _concatenate(parts: list[I64]) -> I64:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
